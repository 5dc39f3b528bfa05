"""Compute pseudogradients again: take a session's inner steps once more, from the bucket alone.

    θ_s from the chain ─▶ the replica's own loop, on its recorded rollouts ─▶ Δ ─▶ the codec ─▶ comparison.py
         ▲                    sync after the offer's h inner steps                                    │
         └──────────────────────────── θ of the session's next step ◀─────────────────────────────────┘

A session is followed from its first offer to its last, because its optimizer's state continues from step to step.
Rollouts that were not recorded are made again, with the session's seeds.

A bundle that an actor may have sampled and that is gone cannot be made again: from its step on, nothing is compared.
A bundle of a replacement's first outer step that is gone is made again with the replacement's seeds. If a predecessor
made the bundle, the pseudogradient may differ without a fault, and is listed as not checked.

Not promised: fragments (F > 1) and a delay (τ > 0); a replica of several ranks; a session that took over moments or a
codec's residual, whose bytes are deleted when they are used; a script's own loop; the same bits on another kind of
processor or a GPU.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.audit.comparison import Holder, OfferComparison, Recomputed
from diloco.model.contributions import read_mean
from diloco.model.export import model_record, patient, start_arrays, start_folder
from diloco.model.fetch import fetch_files
from diloco.outer.frozen import refuse_other_base
from diloco.outer.loop import OuterLoop
from diloco.outer.make import make_diloco
from diloco.outer.managers.stand_in import StandIn
from diloco.outer.rounds import Work, is_alone
from diloco.process.ranks import forget_launcher
from diloco.process.watchdog import Watchdog
from diloco.replica.door import RolloutDoor
from diloco.replica.replica import REJOIN_WARMUP, data_position, seeds_of
from diloco.replica.rollouts import BucketPlaces, staleness_in
from diloco.run.config import ConfigError
from diloco.run.record import Run
from inner import build_inner
from inner.errors import InnerError
from inner.rollouts.recording.bundle import Bundle
from inner.rollouts.recording.recorded import BundlePlace, Unfit, can_record, record_rollouts
from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.membership import controls_above, read_claim, read_control, read_leave
from rendezvous.background import no_emit, together_on
from rendezvous.clock import SystemClock
from rendezvous.errors import GaveUp, RendezvousError, StoreUnclear
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Commit, Offer, decode_or_none
from rendezvous.records.rollouts import read_record
from rendezvous.snapshots.replay import StateReplay
from rendezvous.store import VOID, PatientStore, Store

PATIENCE_S = 10.0
MOST_THREADS = 256  # OpenMP would end this process if a forged record named very many
LOOKED_AT = 20  # to learn a process's number of threads, about so many of a slot's bundles are read

Tell = Callable[[str], None]


def recompute_offers(run: Run, tell: Tell = lambda text: None) -> Recomputed:
    """Compute the pseudogradients of all sessions again, and compare.   tell: called with each session's name."""
    forget_launcher()
    found = Recomputed()
    outer = run.config.outer
    if run.config.script is not None or outer.fragments > 1 or outer.fragment_sync_delay:
        kind = "a script's inner steps" if run.config.script is not None else "inner steps with fragments or a delay"
        found.unchecked.append(f"{kind}, which cannot be taken again from the bucket")
        return found
    store = PatientStore(run.store, SystemClock(), PATIENCE_S)
    for holder, offers in sorted(_offers_of_sessions(store).items()):
        if why := _why_not(store, holder):
            found.unchecked.append(f"{len(offers)} pseudogradients of {holder}: {why}")
            continue
        tell(f"{holder}: {len(offers)} pseudogradients")
        try:
            _Session(run, store, holder, offers, found).follow()
        except (GaveUp, StoreUnclear):  # repeating the command can check it: "all is equal" would hide that
            raise
        except (RendezvousError, InnerError, ConfigError) as error:
            found.stopped += not isinstance(error, RendezvousError)
            found.unchecked.append(f"pseudogradients of {holder}: {error}")
    return found


def _offers_of_sessions(store: Store) -> dict[Holder, dict[int, Offer]]:
    """Return each session's offers by step, listed or not."""
    found: dict[Holder, dict[int, Offer]] = {}
    for t in takewhile(lambda t: store.get(layout.commit_key(t)) is not None, count()):  # verify.py tells of a gap
        for key in store.list(layout.offers_prefix(t)):
            offer = decode_or_none(Offer, store.get(key))
            if offer is not None and offer.step == t:
                found.setdefault(Holder(offer.slot, offer.generation), {})[t] = offer
    return found


def _why_not(store: Store, holder: Holder) -> str:
    claim = read_claim(store, holder.slot, holder.generation)
    if claim is not None and claim.ranks > 1:
        return f"it had {claim.ranks} processes, and one process sums in another order"
    before = read_leave(store, holder.slot, holder.generation - 1) if holder.generation > 1 else None
    if before is not None and before.residual:
        return f"it took over what {holder.slot}-{before.generation} left, and those bytes are deleted"
    return ""


class _Checked(Exception):
    """The error that ends the training after a session's last offer."""


class _Session(StandIn):
    """A repeat of one session's inner steps. Replaces the Manager and the OuterRounds of its OuterLoop."""

    behind = fenced = alone = done = False
    h_cap = 1 << 53
    why = ""
    round_began = 0.0

    def __init__(self, run: Run, store: PatientStore, holder: Holder, offers: Mapping[int, Offer], to: Recomputed):
        self._run = run
        self._store = store
        self._holder = holder
        self._offers = offers
        self._to = to
        self._clock = SystemClock()
        self._rules = run.config.outer.rules
        self._comparison = OfferComparison(run, store, holder, to)
        self._reducer = Reducer(store, self._clock, no_emit, self._rules, together=together_on(run.store))
        self._step = min(offers)
        self._inner = 0
        self._taken: Commit | None = None
        self._recorded: _Recorded | None = None
        self.rounds = self
        self.watchdog = Watchdog(self._clock, 0.0)
        self.stats: Callable[[], dict[str, float]] = dict

    def follow(self) -> None:
        """Compute the session's inner steps again, and compare its offers."""
        with (
            tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch,
            suppress(_Checked),
            _threads(_threads_of(self._store, self._holder)),
        ):
            self._train(Path(scratch))

    def _train(self, scratch: Path) -> None:
        run, before = self._run, self._run.record.parent
        slot, generation = self._holder
        seeds = seeds_of(run, slot, generation)
        record = model_record(run)
        model = start_folder(run, record, scratch / "model")
        files = fetch_files(patient(run), scratch / "code")
        (scratch / "inner").mkdir()
        loop: Any = build_inner(run.config.inner, model, files, seeds, REJOIN_WARMUP, scratch=scratch / "inner")
        refuse_other_base(record.base, loop.model)
        if hasattr(loop, "trainer") and can_record(loop.trainer):
            self._recorded = _Recorded(self._run, self._store, self._holder, self._to, before.outer_steps + self._step)
            record_rollouts(loop.trainer, self._recorded)
        config = replace(run.config.outer, sync_seconds=None)  # an offer's h says when its round ended, not this clock
        with make_diloco(loop.model, loop.optimizer, self, config, boundary=loop.boundary) as outer:
            progress = lambda: outer.progress(before.outer_steps, run.config.fleet.steps)  # noqa: E731
            loop.follow(lambda: before.outer_steps + outer.committed(), outer.theta, self._averaged, progress)
            start = data_position(run, self._step, slot=slot, generation=generation)
            loop.start_at(start // loop.boundary * loop.boundary)
            loop.train(lambda: False)

    # ---------------------------------------------------------------- what the OuterLoop calls

    def join(self, loop: OuterLoop) -> None:
        """Load θ of the session's first offer."""
        self._loop = loop
        self._chain = Chain(self._store, 2)
        self._replay = StateReplay(
            self._store, self._chain, loop.state, 1, self._mean,
            emit=no_emit, theta_0=lambda: start_arrays(self._run, model_record(self._run)), mends=False,
        )  # fmt: skip
        if not self._replay.load_snapshot(upto=self._step):
            raise RendezvousError(f"no snapshot is left from which θ of step {self._step} can be computed")
        for _ in self._replay.commits(self._step):
            pass

    def _mean(self, commit: Commit, out: np.ndarray) -> None:
        read_mean(self._reducer, commit, out)

    def progress(self, inner: int, rate: float) -> float:
        self._inner = inner
        return rate

    @property
    def leaving(self) -> bool:
        """Whether the session made its offer after as many inner steps as have been taken now."""
        return self._inner >= self._offers[self._step].h

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, **_: Any) -> Work:
        """Compare Δ with the offer, and then write the mean of the step's commit over Δ."""
        delta = tensor.detach().numpy()
        lost, inherited = (self._recorded.lost, self._recorded.inherited) if self._recorded is not None else ("", "")
        self._comparison.compare(
            delta, self._loop.thetas[0].numpy(), self._offers[self._step], lost=lost,
            doubt=inherited or self._unknown_rate, taken=self._recorded.taken if self._recorded is not None else {},
        )  # fmt: skip
        if self._step == max(self._offers):
            raise _Checked
        commit = self._chain.read(self._step)
        assert commit is not None, "only offers of committed steps are looked at"
        self._mean(commit, delta)
        self._taken = commit
        return Work(lambda: None)

    def finish_round(self) -> int | None:
        if self._taken is None:
            return None
        self.alone = is_alone(self._taken, (self._holder.slot, self._holder.generation), self._rules.codec)
        self._taken = None
        self._step += 1
        return 0

    def catch_up(self, late: Callable[[int], None]) -> None:
        """Apply the steps without an offer of this session, up to its next offer."""
        while self._step not in self._offers:
            late(self._step)
            commit = self._chain.read(self._step)
            assert commit is not None, "there is a later offer"
            mean = np.empty(self._replay.state.size(0), np.float32)
            self._mean(commit, mean)
            self._replay.state.apply(0, mean)
            self._step += 1

    def offer(self, delta: np.ndarray, h: int) -> None:
        """Do nothing: without fragments no work is left for a missed step."""

    def close(self, reason: str) -> None: ...

    def current_step(self) -> int:
        return self._step + (self._taken is not None)

    def _averaged(self) -> int:
        """Return the number of replicas that the newest commit averaged; before any commit, the wanted number."""
        step = self.current_step()
        commit = self._chain.read(step - 1) if step else None
        return len(commit.fresh_offers) if commit else (self._asked_for or [1])[-1]

    @cached_property
    def _asked_for(self) -> list[int]:
        """Return the numbers of replicas that control records asked for until this session's first offer.

        The first record is older than each offer, whatever their writers' clocks say.   []: the records are gone."""
        until = self._offers[min(self._offers)].at
        return [c.replicas for c in controls_above(self._store, -1) if c.replicas and (c.n == 0 or c.at <= until)]

    @property
    def _unknown_rate(self) -> str:
        """Return why its learning rate is unknown; "" if it is known."""
        numbers = sorted(set(self._asked_for))
        if min(self._offers) or len(numbers) == 1:
            return ""
        how = f"which changed: {numbers}" if numbers else f"and {layout.control_key(0)}, which says it, is gone"
        return f"before the first commit, its learning rate depends on the number of replicas, {how}"


class _Recorded(BucketPlaces):
    """The bundles of a session, for reading only.   began: the outer step of its first offer, counted as in places."""

    def __init__(self, run: Run, store: Store, holder: Holder, to: Recomputed, began: int) -> None:
        slot, generation = holder
        super().__init__(
            store,
            SystemClock(),
            self._note,
            run=run.record.nonce,
            slot=slot,
            by=generation,
            engine="transformers",
            staleness=staleness_in(run),
        )
        self._to = to
        self._refused = list[tuple[int, str, str, str]]()
        self._other_step: tuple[str, int, memoryview] | None = None  # a bundle of another step: key, step, payload
        claimed = map(layout.claimed_slot, store.list(layout.CLAIMS))
        self._has_actors = read_control(store).most_actors > 0 or any(
            slot and layout.is_actor(slot) for slot in claimed
        )
        self._inherits_at = began if run.config.fleet.record_rollouts and generation > 1 else -1
        self.inherited = ""  # the rollouts that are gone and perhaps came with an earlier session's random states
        self.lost = ""  # the rollouts that are gone and cannot be made again: an actor may have sampled them
        self.taken = Counter[int]()  # outer step -> other processes' bundles in the session's places
        self.door = RolloutDoor(
            store, SystemClock(), no_emit, None, run=run.record.nonce, slot=slot, by=generation,
            share=run.config.fleet.check_rollouts, parent=run.record.parent.outer_steps,
        )  # fmt: skip

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        """Return the bundle that the session trained on, if possible its own; None if that bundle is gone.

        If the session's own bundle is a later attempt, the session refused the earlier attempts.
        """
        self._other_step = None
        for self.anew in (True, False):
            self._refused.clear()
            self.is_past_others = False  # if the bundle of one place is lost, later places may still have bundles
            if (found := super().find(place, unfit)) is not None:
                return found
        self._to.off += self._refused
        self._attempt = 0
        if not self.lost and (self._has_actors or self._has_verdict(place)):
            self.lost = f"{self._key(place)} is gone or cannot be used; its rollouts may be from an actor"
        if not self.inherited and place.outer == self._inherits_at:
            self.inherited = f"{self._key(place)} is gone, which an earlier session may have sampled"
        return None

    def _read(self, place: BundlePlace, body: bytes, unfit: Unfit) -> tuple[Bundle | None, str]:
        if body == VOID:
            return None, "it is empty, or does not have the run's tag"
        record, payload = read_record(body)
        if record.by == self.by and record.step != place.outer:
            self._other_step = self._key(place), record.step, payload
        bundle, why = super()._read(place, body, unfit)
        self.taken[place.outer] += record.by != self.by and bundle is not None and not why
        return bundle, why

    def _has_verdict(self, place: BundlePlace) -> bool:
        """Whether the slot has judged an actor's bundle in this place."""
        prefix = self._key(place).removesuffix("0.bundle")
        return any(key.endswith(".verdict") for key in self.store.list(prefix))

    def _note(self, event: str, **fields: Any) -> None:
        if event == "rollouts_refused":
            self._refused.append((fields["step"], fields["key"], self.slot, fields["text"]))

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        """Count rollouts that were made again.   Note a record of this session that names another step."""
        self._to.remade += 1
        key, step, payload = self._other_step or ("", 0, b"")
        if payload and payload == made.pack():
            text = f"its record names outer step {step}, and it was sampled on step {place.outer}"
            self._to.off.append((place.outer, key, self.slot, text))
        return made


def _threads_of(store: Store, holder: Holder) -> int:
    """Return the number of threads in a record of the session's bundles, or this process's number."""
    keys = store.list(f"{layout.ROLLOUTS}{holder.slot}/")
    for key in keys[:: max(1, len(keys) // LOOKED_AT)]:
        with suppress(RendezvousError):
            record, _ = read_record(store.get(key) or b"")
            if record.by == holder.generation:
                return min(record.threads, MOST_THREADS)
    return torch.get_num_threads()


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
