"""Read θ of any committed step from the bucket, to export, audit or fork it.

    θ_t = snapshot(s) ∘ outer(mean_s) ∘ … ∘ outer(mean_{t−1})           s ≤ t, the newest readable snapshot

A replica that joins uses the same replay (snapshots/replay.py).  Here no replica joins, and nothing is written: the
replay avoids a damaged object if it can, but does not repair it (decision 046).
Not promised: speed for a step far from a snapshot.
"""

import json
import tempfile
from collections.abc import Callable, Container
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from diloco.model.contributions import read_mean
from diloco.model.fetch import fetch_model, is_weights_file, save_below
from diloco.model.hub_wait import next_steps_text
from diloco.model.start_model import first_arrays, refuse_other_bits
from diloco.outer.flat import trainable_parameters
from diloco.outer.optimizer import Nesterov, OuterState
from diloco.run.config import ConfigError, OuterConfig
from diloco.run.record import ModelRecord, Run, read_model, read_run
from diloco.run.sections import keep_bytes
from diloco.runlog.reached import refuse_lost
from inner.models.lora import ADAPTER, save_adapter
from inner.models.naming import HubError
from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.salvage import read_standing_control
from rendezvous.background import no_emit, together_on
from rendezvous.clock import SystemClock
from rendezvous.keeping.reach import Reach, read_reach
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit
from rendezvous.snapshots.replay import StateReplay
from rendezvous.store import PatientStore, Store

BASE = "base.json"  # in an exported adapter's folder: its base model
MODEL_CONFIGS = ("config.json", "generation_config.json")  # the configs of a whole model; an adapter has another config
STATE_PATIENCE_S = 10.0


def export(url: str, step: int | None, to: Path, merge: bool = False) -> int:
    """Write θ_step (default: the newest) as a normal from_pretrained folder. Return the step.

    With [inner.lora], write an adapter's folder for PEFT.   merge: write the whole model, with the adapter merged;
    a base in 4 bits is dequantised to inner.dtype first, as the adapter was trained on these values.
    """
    run = read_run(url)
    record = model_record(run)
    refuse_merge(run, merge)
    at, state = state_at(run, record, step)
    write_model(run, record, state, at=at, to=to, merge=merge)
    return at


def refuse_merge(run: Run, merge: bool) -> None:
    """Raise ConfigError if the run has no adapter to merge, or only a script's adapter, whose base we cannot load."""
    if merge and run.config.script is not None:
        raise ConfigError(
            "--merge takes the adapter of [inner.lora], and a script trains this run. Leave --merge out; if the script "
            "trains an adapter, merge its folder with PEFT: PeftModel.from_pretrained(MODEL, DIR).merge_and_unload()"
        )
    if merge and run.config.inner.lora is None:
        raise ConfigError("this run has no [inner.lora]: it trains the whole model. Leave --merge out")


def write_model(run: Run, record: ModelRecord, state: OuterState, *, at: int, to: Path, merge: bool = False) -> None:
    """Write θ like `export`.   at: the outer step that θ belongs to."""
    if run.config.script is not None:
        from diloco.model.script_model import write_script_model

        return write_script_model(patient(run), record, state, to)
    from inner.train.build import load_dequantised, load_start  # it imports transformers

    inner = run.config.inner
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        start = start_folder(run, record, Path(scratch) / "model")
        model, _ = load_start(start, inner.dtype, inner.lora)
        if record.base:
            from diloco.outer.frozen import refuse_other_base

            refuse_other_base(record.base, model)
        if merge and inner.lora is not None and inner.lora.base is not None:
            model = load_dequantised(start, inner.dtype, inner.lora)
        put_into(model, state)
        if inner.lora is not None and not merge:
            _copy_others(start, to, left_out=MODEL_CONFIGS)
            save_adapter(model, to)
            save_below(to, BASE, _describe_base(record, inner.model, at))
        else:
            _copy_others(start, to)
            (model.merge_and_unload() if merge else model).save_pretrained(to)
    for name in ("config.json", "tokenizer_config.json"):
        _drop_own_code(to / name)


def _drop_own_code(path: Path) -> None:
    """Take `auto_map` out of a config: a run trains transformers' own class, and copies no code of the start model."""
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    if config.pop("auto_map", None) is not None:
        path.write_text(json.dumps(config, indent=2, ensure_ascii=False), encoding="utf-8")


def _describe_base(record: ModelRecord, model: str, step: int) -> bytes:
    """Return the content of base.json: the base model of an exported adapter."""
    files = {name: stored["digest"] for name, stored in record.files.items() if not name.startswith(f"{ADAPTER}/")}
    base = {"model": model, **record.hub, "files": files, "weights": record.base, "outer_step": step}
    return json.dumps(base, indent=2).encode()


def _no_snapshot(store: Store) -> str:
    """Explain that no snapshot can be read: the run is too young, or its bucket has lost them."""
    if store.get(layout.commit_key(0)) is None:
        return "this run has no readable snapshot yet; wait for its first outer step"
    return (
        f"no snapshot can be read below {store.url}/{layout.SNAPSHOTS}, though outer steps are committed, so θ cannot "
        "be computed: the bucket was edited, or lost objects. Restore the snapshots from a backup"
    )


def state_at(
    run: Run, record: ModelRecord, step: int | None, tell: Callable[..., None] = no_emit
) -> tuple[int, OuterState]:
    """Replay θ and outer momentum before commit `step` (default: after the last one). Return the step and the state."""
    clock = SystemClock()
    store = PatientStore(run.store, clock, STATE_PATIENCE_S)
    if step is not None:
        refuse_gone(run, step)
    rules = run.config.outer.rules
    reducer = Reducer(store, clock, tell, rules, together=together_on(run.store))

    def mean(commit: Commit, out: np.ndarray) -> None:
        read_mean(reducer, commit, out)

    state = empty_state(record, run.config.outer)
    replay = StateReplay(
        store, Chain(store, 2), state, rules.fragments, mean,
        emit=tell, theta_0=lambda: start_arrays(run, record), mends=False,
    )  # fmt: skip
    if not replay.load_snapshot(upto=step):
        raise ConfigError(_no_snapshot(store))
    for _ in replay.commits(step):
        pass
    if step is None or replay.step < step:
        refuse_lost(store, replay.step)
    if step is not None and replay.step < step:
        raise ConfigError(
            f"step {step} has not been taken yet: the run is at step {replay.step}. Name that or an earlier step"
        )
    return replay.step, state


def keep_of(run: Run) -> int | str:
    """Return the limit of the run's blobs: the limit that `diloco gc` set, or fleet.keep."""
    return read_standing_control(run.store)[0].keep or run.config.fleet.keep


def what_is_kept(run: Run) -> Reach | None:
    """Return which θ can still be computed from the bucket; None: all of them."""
    return None if keep_bytes(keep_of(run)) is None else read_reach(run.store)


def refuse_gone(run: Run, step: int) -> None:
    """Raise ConfigError if θ_step can no longer be computed from the bucket."""
    left = what_is_kept(run)
    if left is None or left.covers_step(step):
        return
    raise ConfigError(
        f"θ_{step} cannot be computed any more: what is kept (fleet.keep = {keep_of(run)}) {left.in_words()}. Name one "
        "of those steps, or none for the newest"
    )


def empty_state(record: ModelRecord, outer: OuterConfig) -> OuterState:
    """Make zeros in the shapes of the run's θ and momentum, and of AutoLR's memory if lr = "auto"."""
    sizes = record.fragment_sizes(outer.fragments)
    thetas = [nn.Parameter(torch.zeros(size, dtype=torch.float32, device="cpu")) for size in sizes]
    optimizers = [Nesterov(theta, lr=outer.lr, momentum=outer.momentum) for theta in thetas]
    return OuterState([theta.data for theta in thetas], optimizers)


@torch.no_grad()
def put_into(model: nn.Module, state: OuterState) -> None:
    """Write the model's trainable parameters ← θ, rounded to their dtype."""
    flat = torch.cat(state.thetas)
    at = 0
    for _, p in trainable_parameters(model):
        part: Tensor = flat[at : at + p.numel()]
        p.copy_(part.view(p.shape))
        at += p.numel()


def start_arrays(run: Run, record: ModelRecord) -> dict[str, np.ndarray]:
    """Return the outer state's first arrays, for a run whose snapshot 0 has no blob."""
    from inner.train.build import load_start  # it imports transformers

    config = run.config
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = start_folder(run, record, Path(scratch))
        model, _ = load_start(folder, config.inner.dtype, config.inner.lora)
        refuse_other_bits(record.theta, model)
        return first_arrays(folder, config.inner.dtype, config.outer, config.inner.lora)


def patient(run: Run) -> Run:
    """Return the run with a store that repeats requests without an answer, for a command, which no process restarts."""
    return replace(run, store=PatientStore(run.store, SystemClock(), STATE_PATIENCE_S, waits_on_refusal=False))


def start_folder(run: Run, record: ModelRecord, folder: Path) -> Path:
    """Fetch the start model into `folder` and return its path.   Raises ConfigError if the Hub does not give it."""
    try:
        return fetch_model(patient(run).store, record, folder)
    except HubError as error:
        assert record.hub_model is not None
        raise ConfigError(f"{error}. {next_steps_text(record.hub_model)}") from error


def model_record(run: Run) -> ModelRecord:
    """Return the record of the run's model.   Raises RecordsLost if it is gone, ConfigError if it is not there yet."""
    if (record := read_model(run)) is None:
        own = ": DiLoCoCallback publishes it when it joins, and a script with make_diloco saves its own"
        why = " yet: it is published when the first replicas start" if run.config.script is None else own
        raise ConfigError(f"{run.url} ({run.config.name}) has no model{why}")
    return record


def _copy_others(start: Path, to: Path, left_out: Container[str] = ()) -> None:
    """Copy all files except weights and adapter: tokenizer, chat template, generation config."""
    to.mkdir(parents=True, exist_ok=True)
    for path in sorted(p for p in start.rglob("*") if p.is_file() and not is_weights_file(p.name)):
        name = path.relative_to(start).as_posix()
        if name not in left_out and not name.startswith(f"{ADAPTER}/"):
            save_below(to, name, path.read_bytes())
