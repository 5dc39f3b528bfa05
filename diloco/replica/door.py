"""Check actors' bundles of rollouts before a replica trains on them ([fleet] check_rollouts).

    an actor's bundle ── has it a verdict? ──▶ the verdict counts
          │ no
          ├── its actor was doubted at MOST_DOUBTS earlier places of this slot ──▶ not used, not checked
          ├── the actor's first here, or drawn, or doubted once ──▶ one forward with weights/{t} ──▶ verdict, put_once
          └── else ──▶ used

    drawn    SHA-256(commit T−1 ‖ key ‖ nonce) is below the share; T: the outer step that trains it

A verdict binds this session, its replacements and an audit.  An audit of an earlier session ignores it.  Which bundles
are checked depends only on the chain and on earlier verdicts, so all sessions check the same bundles.  Only the check's
sums may differ on another machine; so the first verdict counts.

Not promised: that every false bundle is found (inner/extras/rollout_check/check.py lists the limits).  An actor that
puts a bundle after commit T−1 can know whether the bundle is drawn.  A bundle that names a session as its maker is not
checked: only a writer of the bucket can write such a bundle, and a run key keeps other writers out.
"""

import hashlib
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from diloco.model.export import model_record, start_folder
from diloco.outer.flat import trainable_parameters
from inner.rollouts.recording.bundle import Bundle
from inner.rollouts.recording.found import is_truncated
from rendezvous import layout
from rendezvous.background import Emit, no_emit
from rendezvous.clock import Clock
from rendezvous.records.judgements import LARGE, MOST_DOUBTS, RolloutVerdict
from rendezvous.records.records import decode_or_none, new_nonce
from rendezvous.records.rollouts import Rollouts
from rendezvous.store import Store, put_once
from rendezvous.weights.follower import FollowedWeights, WeightsFollower
from rendezvous.weights.patch import bf16_bits

if TYPE_CHECKING:
    from diloco.process.session import Session
    from diloco.run.record import Run
    from inner.rollouts.recording.recorded import BundlePlace

ROLLOUTS, TOKENS = 16, 256  # limits of checked rollouts per bundle and of tokens per turn: they bound the cost
POSITIONS = 1 << 20  # in effect all tokens: with the check's default of 32, 1 of 20 honest 8-bit bundles was doubted
SIGMAS = 5.0  # limit of the surprise, in standard deviations, as in the check itself
SHOWN = 2000  # characters of the reasons in a verdict


@dataclass(frozen=True)
class DoorFinding:
    """The result of one check.   doubts: reasons not to use the bundle; "": none."""

    doubts: str
    disagreement: float = LARGE
    surprise: float = LARGE


Check = Callable[[int, Bundle, int], DoorFinding]  # (outer step of the weights, bundle, seed)


class RolloutDoor:
    """Decides whether one slot may train on actors' bundles, and records its verdicts.   by: the session's generation.

    Verdicts of later generations do not count.   check: None: read verdicts only (an audit).
    parent: outer steps of the runs before this one.
    """

    def __init__(
        self, store: Store, clock: Clock, emit: Emit, check: Check | None, *, run: str, slot: str, by: int,
        share: float, parent: int,
    ) -> None:  # fmt: skip
        self._store = store
        self._clock = clock
        self._emit = emit
        self._check = check
        self._run = run
        self._prefix = f"{layout.ROLLOUTS}{slot}/"
        self._by = by
        self._share = share
        self._parent = parent
        self._verdicts: dict[str, RolloutVerdict] | None = None
        self._refused = set[str]()  # actors that were reported
        self._one_at_a_time = Lock()  # ranks ask in parallel threads (rank_rollouts.py), and checks use one model

    def lets_in(self, place: "BundlePlace", key: str, record: Rollouts, bundle: Bundle) -> bool:
        """Whether the slot may train on an actor's bundle.   key: the bundle's key.   Raises RendezvousError."""
        with self._one_at_a_time:
            return self._lets_in(place, key, record, bundle)

    def _lets_in(self, place: "BundlePlace", key: str, record: Rollouts, bundle: Bundle) -> bool:
        verdicts = self._known()
        if (verdict := verdicts.get(key)) is not None and verdict.of == record.nonce:
            return not verdict.doubts
        earlier = [v for at, v in verdicts.items() if at < key and v.actor == record.actor]
        doubted = sum(bool(v.doubts) for v in earlier)
        if doubted >= MOST_DOUBTS:
            self._tell_once(place, key, record)
            return False
        seed = self._seed(place, key, record)
        if self._check is None or not (not earlier or doubted or seed / 2**64 < self._share):
            return True
        return not self._judge(self._check, place, key, record, bundle, seed).doubts

    def _judge(
        self, check: Check, place: "BundlePlace", key: str, record: Rollouts, bundle: Bundle, seed: int
    ) -> RolloutVerdict:
        """Check the bundle, and return the recorded verdict: the new one, or a verdict recorded before."""
        found = check(record.step - self._parent, bundle, seed)
        made = RolloutVerdict(
            of=record.nonce, actor=record.actor, by=self._by, step=record.step, nonce=new_nonce(),
            disagreement=_bounded(found.disagreement), surprise=_bounded(found.surprise), doubts=found.doubts[:SHOWN],
        )  # fmt: skip
        body = put_once(self._store, self._clock, layout.beside_bundle(key, "verdict"), made.encode())[1]
        verdict = decode_or_none(RolloutVerdict, body) or made
        self._known()[key] = verdict
        if verdict.doubts:
            text = f"the actor {record.actor}: {verdict.doubts}"
            self._emit(
                "rollouts_doubted", step=place.outer, key=key, actor=record.actor, text=text,
                disagreement=verdict.disagreement, surprise=verdict.surprise,
            )  # fmt: skip
        return verdict

    def _known(self) -> dict[str, RolloutVerdict]:
        """Return the slot's verdicts by their bundles' keys: one LIST for a session, and a GET for each verdict."""
        if self._verdicts is None:
            listed = set(self._store.list(self._prefix))
            judged = [key for key in listed if layout.beside_bundle(key, "verdict") in listed - {key}]
            found = {
                key: decode_or_none(RolloutVerdict, self._store.get(layout.beside_bundle(key, "verdict")))
                for key in judged
            }
            self._verdicts = {key: v for key, v in found.items() if v is not None and v.by <= self._by}
        return self._verdicts

    def _seed(self, place: "BundlePlace", key: str, record: Rollouts) -> int:
        """Return 64 bits that the actor could not know while outer step T − 1 was open."""
        first = place.outer - self._parent
        before = self._store.get(layout.commit_key(first - 1)) if first > 0 else None
        parts = (before or self._run.encode(), key.encode(), record.nonce.encode())
        return int.from_bytes(hashlib.sha256(b"\0".join(parts)).digest()[:8], "big")

    def _tell_once(self, place: "BundlePlace", key: str, record: Rollouts) -> None:
        if record.actor not in self._refused:
            self._refused.add(record.actor)
            text = (
                f"the actor {record.actor} was doubted {MOST_DOUBTS} times, so its later rollouts are not used. "
                "Repair it, and start it under another name"
            )
            self._emit("rollouts_doubted", step=place.outer, key=key, actor=record.actor, text=text)


def door_of(run: "Run", session: "Session", loop: Any, store: Store) -> RolloutDoor:
    """Return the door of a session's slot, which checks bundles with the loop's model."""
    check = ModelCheck(store, loop.trainer, loop.model, lambda: start_weights(run))
    return RolloutDoor(
        store, session.clock, session.emit, check, run=run.record.nonce, slot=session.rv.slot,
        by=session.rv.generation, share=run.config.fleet.check_rollouts, parent=run.record.parent.outer_steps,
    )  # fmt: skip


def _bounded(number: float) -> float:
    return max(-LARGE, min(LARGE, number)) if not math.isnan(number) else LARGE


class ModelCheck:
    """The check with a replica's own model, into which it loads the bundle's weights.   store: has these weights.

    start: returns the run's first weights, of which the bucket has no bf16 copy.
    """

    def __init__(
        self, store: Store, trainer: Any, model: nn.Module, start: Callable[[], FollowedWeights | None]
    ) -> None:
        self._start = start
        self._follower = WeightsFollower(store, no_emit)
        self._newest: FollowedWeights | None = None
        self._trainer = trainer
        self._model = model

    def __call__(self, step: int, bundle: Bundle, seed: int) -> DoorFinding:
        from inner import check_rollouts

        weights = self._weights_of(step)
        if weights is None:
            return DoorFinding(
                f"it names the weights of outer step {step}, and the bucket has no sound copy of these to check it with"
            )
        trainer = self._trainer
        sigmas = math.inf if is_truncated(trainer) else SIGMAS  # with top-p, tokens are not drawn from all of π
        with standing_at(self._model, weights), trainer.accelerator.autocast():
            found = check_rollouts(
                trainer.model,
                turns_of(bundle, seed),
                temperature=trainer.temperature,
                positions=POSITIONS,
                sigmas=sigmas,
            )
        return DoorFinding("; ".join(found.doubts), found.disagreement, found.surprise)

    def _weights_of(self, step: int) -> FollowedWeights | None:
        if self._newest is None or self._newest.step != step:
            self._newest = None  # the follower will write over these tensors
            self._newest = self._follower.weights_of(step) if step else self._start()
        return self._newest


def start_weights(run: "Run") -> FollowedWeights | None:
    """Return the start model's weights in bf16; None for a fork, whose θ₀ is its ancestor's θ and not these files."""
    if run.record.parent.url:
        return None
    from inner.train.build import load_start

    with TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = start_folder(run, model_record(run), Path(scratch) / "model")
        model, _ = load_start(folder, run.config.inner.dtype, run.config.inner.lora)
    named = trainable_parameters(model)
    flat = torch.cat([p.detach().float().flatten() for _, p in named]).numpy()
    starts = accumulate((p.numel() for _, p in named), initial=0)
    parameters = {name: (at, tuple(p.shape)) for (name, p), at in zip(named, starts, strict=False)}
    return FollowedWeights(step=0, parameters=parameters, bits=bf16_bits(flat), changed=frozenset(), bytes=0)


@contextmanager
def standing_at(model: nn.Module, weights: FollowedWeights) -> Iterator[None]:
    """Give the model other weights, and evaluation mode, inside a `with`; then restore its bits.

    The model's own values wait in host memory.   Raise WrongRun, and change nothing, for weights that do not fit.
    """
    own = {n: p.detach().to("cpu", copy=True) for n, p in model.named_parameters() if n in weights.parameters}
    modes = {module: module.training for module in model.modules()}
    weights.load_into(model)
    try:
        model.eval()
        yield
    finally:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in own:
                    parameter.copy_(own[name])
        for module, training in modes.items():
            module.training = training


def turns_of(bundle: Bundle, seed: int) -> list[tuple[Sequence[int], Sequence[int], Sequence[float]]]:
    """Return (context, the model's tokens, log-probs) of the turns of some rollouts, which the seed chooses."""
    assert bundle.logprobs is not None
    chosen = random.Random(seed).sample(range(len(bundle.ids)), min(ROLLOUTS, len(bundle.ids)))
    found = list[tuple[Sequence[int], Sequence[int], Sequence[float]]]()
    for i in chosen:
        ids, logprobs = list(bundle.ids[i]), bundle.logprobs[i]
        mask = [1] * len(ids) if bundle.mask is None else bundle.mask[i]
        at = 0
        for is_own, tokens in groupby(mask):
            end = at + len(list(tokens))
            if is_own:
                last = min(end, at + TOKENS)
                found.append(([*bundle.prompt_ids[i], *ids[:at]], ids[at:last], logprobs[at:last]))
            at = end
    return found
