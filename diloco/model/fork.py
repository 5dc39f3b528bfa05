"""Start a run from a step of another run: `diloco train CONFIG --run NEW --from OLD[@STEP]`.

    OLD   ●──●──● θ_t ──●──●          only read
                  │  its start model, θ_t, and with --momentum the outer momentum
                  ▼
    NEW           ● θ_0 ──●──●        run.json has the parent

    written in this order: run.json · model/… · snapshots/0 · model/manifest.json (replicas wait for it)

NEW continues OLD's count of steps: its data order, its inner.schedule and the warm-up of late sessions continue from
OLD's step t.  Every slot continues from the largest data position of OLD's slots.  With the same settings, NEW takes
the steps that OLD would take if all its replicas were replaced at t.  NEW numbers its own steps from 0.

Not promised: moments of the inner optimizers, which no bucket has; the sampling noise, which each session draws.
"""

import shlex
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diloco.model.export import empty_state, model_record, state_at
from diloco.model.fetch import fetch_stored
from diloco.process.data_position import farthest, read_offers
from diloco.run.config import BUCKET, ConfigError, RunConfig
from diloco.run.record import ModelRecord, Parent, Run, current_url, read_run
from rendezvous import layout
from rendezvous.background import together_on
from rendezvous.clock import Clock
from rendezvous.snapshots import record as snapshots
from rendezvous.store import PatientStore, put_once

MODEL_SETTINGS = ("model", "revision", "dtype", "lora")
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Fork:
    """The start of the new run.   arrays: its outer state before the first step.   base: digest of `arrays`."""

    parent: Parent
    origin: Run
    record: ModelRecord
    arrays: dict[str, np.ndarray]
    base: str


def read_fork(spelling: str, config: RunConfig, momentum: bool = False) -> Fork:
    """Read θ of the step that `spelling` (URL, or URL@STEP) names, for this config.   Raises ConfigError."""
    url, at, digits = spelling.rpartition("@")
    named = bool(at) and digits.isdecimal()
    origin = read_run(current_url(url if named else spelling))
    _refuse_unfit(origin, config)
    record = model_record(origin)
    step, theirs = state_at(origin, record, int(digits) if named else None)
    _refuse_middle(step, config.outer.fragments)
    state = empty_state(record, config.outer)
    ours = state.all_arrays()
    for name, array in theirs.all_arrays().items():
        if name in ours and (momentum or name.startswith("theta.")):
            ours[name][:] = array
    before = origin.record.parent
    read = farthest(read_offers(origin.store, step, together_on(origin.store)), origin.config.outer)
    parent = Parent(
        url=origin.url, run=origin.record.nonce, step=step, base=theirs.digest(),
        outer_steps=before.outer_steps + step, inner_steps=before.inner_steps + read,
    )  # fmt: skip
    return Fork(parent, origin, record, ours, state.digest())


def begin(run: Run, fork: Fork, clock: Clock) -> None:
    """Write the start into the run's bucket, unless it is there.  The manifest is last, as replicas wait for it."""
    store = PatientStore(run.store, clock, PATIENCE_S)
    if store.get(layout.MODEL_MANIFEST) is not None:
        return
    for stored in fork.record.files.values():
        if stored["key"]:
            store.put(stored["key"], fetch_stored(fork.origin.store, stored))
    if store.get(layout.snapshot_key(0)) is None:
        snapshots.write_first(store, clock, fork.arrays, base=fork.base, elsewhere=False)
    record = replace(fork.record, at=clock.wall())
    put_once(store, clock, layout.MODEL_MANIFEST, record.encode())


def _refuse_unfit(origin: Run, config: RunConfig) -> None:
    """Raise ConfigError if θ of the other run does not fit this config."""
    if {config.rendezvous, origin.config.rendezvous} != {BUCKET}:
        both = f'it has "{origin.config.rendezvous}", and this config "{config.rendezvous}"'
        raise ConfigError(f'--from needs rendezvous = "{BUCKET}" in {origin.url} and here: {both}')
    theirs, ours = origin.config, config
    for name in MODEL_SETTINGS:
        _refuse_other(origin.url, f"inner.{name}", getattr(theirs.inner, name), getattr(ours.inner, name))
    _refuse_other(origin.url, "outer.fragments", theirs.outer.fragments, ours.outer.fragments)


def _refuse_other(url: str, setting: str, there: Any, here: Any) -> None:
    if there != here:
        raise ConfigError(
            f"{url} has {setting} = {there!r}, and this config has {here!r}. --from copies that run's outer state, so "
            f"{setting} must be the same. To take only the weights: "
            f"`diloco export {shlex.quote(url)} --to DIR`, and inner.model = DIR"
        )


def _refuse_middle(step: int, fragments: int) -> None:
    if rest := step % fragments:
        raise ConfigError(
            f"--from …@{step} is in the middle of a round: with outer.fragments = {fragments} a round has {fragments} "
            f"outer steps. Use @{step - rest}"
        )
