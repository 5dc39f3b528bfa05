"""The outer rounds of one replica on a bucket: what an OuterLoop asks for beside torchft's eight names.

    join(loop)       ──▶  afterwards the loop's θ is the run's                 snapshot, commits
    average(Δ)       ──▶  offer; then, when the caller waits: settle, mean     blob, offer.json ─▶ commit.json, blobs
    finish_round()   ──▶  advance, report (step_report.py)                     snapshot, next step; the log
    catch_up(late)   ──▶  the steps that were decided meanwhile
    progress, close  ──▶                                                       beat, goodbye

Where inner steps go on while a fragment travels, `average` makes the round in a thread of its own, and `finish_round`
takes the outer step once it has landed.

Not promised: more than one round under way; torchft waits for one before it begins the next.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diloco.outer.flat import layout_of
from diloco.outer.model_checks import frozen_digest
from diloco.outer.safety import moved_share
from diloco.outer.step_report import StepReport
from diloco.process.session import Session
from diloco.run.config import AUTO, OuterConfigError
from diloco.run.founding import agree_on_run, solo_warning
from rendezvous.errors import Leaving
from rendezvous.records.records import Commit

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop


class Work:
    """The handle that allreduce returns.  After `wait` the tensor is final and every callback has run."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self, timeout: Any = None) -> bool:
        self._finish()
        return True

    def get_future(self) -> "torch.futures.Future[None]":
        self._finish()
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future


class InFlightRound:
    """A round under way in a thread of its own, while inner steps go on."""

    def __init__(self, fly: Callable[[], Commit]) -> None:
        self._fly = fly
        self._commit = None
        self._error = None
        self._thread = threading.Thread(target=self._run_round, name="round", daemon=True)
        self._thread.start()

    def _run_round(self) -> None:
        try:
            self._commit = self._fly()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        return self._error is not None

    def land(self, timeout_s: float | None = None) -> Commit | None:
        """Return the round's commit, or None if it is not there in time.   Raises the error that ended the round."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return self._commit


class StoreRounds:
    """The OuterRounds (diloco/outer/loop.py) of one claimed slot.

    founds: `join` writes run.json where there is none; else `diloco train` has written it.
    theta_0: the outer state's arrays as the run began, where every replica has them from elsewhere
    (diloco/model/start_model.py).
    """

    done_with_delta = True

    def __init__(
        self, session: Session, *, founds: bool, theta_0: Callable[[], dict[str, np.ndarray]] | None = None
    ) -> None:
        self.session = session
        self.watchdog = session.watchdog
        self.stats: Callable[[], dict[str, float]] = dict  # what the inner loop says of a round, asked at each offer
        self.left = False  # did the `with` end because this replica was asked to go?
        self.loop: OuterLoop | None = None  # None: no loop has joined
        self.in_flight: InFlightRound | None = None
        self._founds = founds
        self._theta_0 = theta_0
        self._report: StepReport | None = None
        self._samples: list[float] = []  # of each fragment, since its last offer
        self._commit: Commit | None = None  # settled, not yet advanced
        self._ahead = True  # may the next step be decided already?  If not, the beat will show it
        self._spent: dict[str, float] = {}
        self.round_began = session.clock.now()

    # ---------------------------------------------------------------- before the first round

    def join(self, loop: "OuterLoop") -> None:
        """Heal the loop: afterwards its θ is the run's.   Raises WrongRun."""
        rv = self.session.rv
        self.loop = loop
        if self._founds:
            self._found_run(loop)
        if loop.rules.codec == AUTO:
            raise OuterConfigError(
                'outer.codec = "auto" is decided when a run is founded, and this manager was given a claimed slot of a '
                "run that stands. Name the codec of that run (run.json has it)"
            )
        rv.set_rules(loop.rules)
        self._report = StepReport(self.session, loop)
        self._samples = [0.0] * loop.rules.fragments
        rv.join(loop.state, self._theta_0)
        rv.baggage = self._pack_moments
        if self.session.weights is not None:
            self.session.weights.layout = layout_of(loop.model)
        self.session.emit("joined", step=rv.step)
        self._unpack_moments(loop)
        self.session.flush()
        self.round_began = self.session.clock.now()

    def _pack_moments(self) -> dict[str, np.ndarray]:
        """The optimizer's moments, for the next session of this slot."""
        from diloco.outer.moments import moments_digest, read_moments

        assert self.loop is not None, "join comes first"
        moments = read_moments(self.loop.model, self.loop.optimizer)
        if moments:
            self.session.emit("moments_left", digest=moments_digest(moments))
        return moments

    def _unpack_moments(self, loop: "OuterLoop") -> None:
        """Give the optimizer the moments that the session before has left, if it has."""
        found = self.session.rv.inherited
        if not found:
            return
        from diloco.outer.moments import moments_digest, read_moments, write_moments

        if why := write_moments(loop.model, loop.optimizer, found):
            self.session.emit("bad_moments", text=f"moments of the session before: {why}; the optimizer starts fresh")
        else:
            taken = read_moments(loop.model, loop.optimizer)
            self.session.emit(
                "moments_taken", digest=moments_digest(taken), bytes=sum(a.nbytes for a in taken.values())
            )

    def _found_run(self, loop: "OuterLoop") -> None:
        """Write run.json, or compare with the one that stands, which names the codec."""
        rv = self.session.rv
        stands = agree_on_run(
            rv.store, self.session.clock, loop.mathematics(), layout_of(loop.model),
            frozen=frozen_digest(loop.model), replicas=rv.wanted.replicas,
        )  # fmt: skip
        loop.rules = replace(loop.rules, codec=stands.codec)
        if text := solo_warning(rv.wanted):
            self.session.emit("warning", kind="solo", text=text)
        self.session.emit("codec", codec=stands.codec, why=stands.why_codec or "as asked for")

    # ---------------------------------------------------------------- a round

    def average(self, delta: np.ndarray) -> Callable[[], None]:
        """Offer Δ; -> the call that waits for the decision and writes the mean over it."""
        loop = self.loop
        assert loop is not None, "join comes first"
        offer = self._prepare_offer(delta, loop.h[self.session.rv.fragment])
        if not loop.overlaps:
            offer()
            return lambda: self._keep_commit(self._settle_mean(delta))

        def run_round() -> Commit:
            offer()
            commit = self._settle_mean(delta)
            self._ahead = self.session.rv.chain.read(commit.t + 1) is not None  # delays no inner step
            return commit

        self.in_flight = flight = InFlightRound(run_round)
        return lambda: self._keep_commit(flight.land())

    def offer(self, delta: np.ndarray, h: int) -> None:
        """Make Δ durable for the open step; leaves if this replica is asked to go."""
        self._prepare_offer(delta, h)()

    def _prepare_offer(self, delta: np.ndarray, h: int) -> Callable[[], None]:
        """Take the stats that go with Δ now; -> the call that makes it durable."""
        stats = {**self.stats(), "moved": moved_share(delta)}
        began = self.session.clock.now()
        self._spent = {"inner_s": began - self.round_began}
        theta = self.loop.thetas[self.session.rv.fragment].numpy() if self.loop else None
        samples = self._samples_inside(stats)

        def offer() -> None:
            began = self.session.clock.now()
            self.session.rv.offer(delta, h, samples=samples, stats=stats, theta=theta)
            self._spent["offer_s"] = self.session.clock.now() - began

        return offer

    def _samples_inside(self, stats: dict[str, float]) -> float:
        """Samples behind the Δ that is offered: those of every round since its fragment's last."""
        self._samples = [n + stats.get("samples", 0.0) for n in self._samples]
        fragment = self.session.rv.fragment
        inside = self._samples[fragment]
        self._samples[fragment] = 0.0
        return inside

    def _settle_mean(self, out: np.ndarray) -> Commit:
        began = self.session.clock.now()
        commit = self.session.rv.settle()
        settled = self.session.clock.now()
        self.session.rv.mean(commit, out)
        self._spent |= {"wait_s": settled - began, "mean_s": self.session.clock.now() - settled}
        assert self._report is not None, "join comes first"
        self._report.note_mean(commit, out)
        return commit

    def _keep_commit(self, commit: Commit | None) -> None:
        self._commit = commit
        self.in_flight = None

    def current_step(self) -> int:
        """Outer steps taken; already one more once a round is settled."""
        return self.session.rv.step + (self._commit is not None)

    def finish_round(self) -> int | None:
        """End the round after torchft's hook; -> the fragment whose outer step was just taken, or None."""
        if self._commit is None:
            return None
        commit = self._commit
        self._commit = None
        fragment = self.session.rv.fragment
        self.session.rv.advance(commit)
        assert self._report is not None
        self._report.emit_step(commit, self._spent)
        return fragment

    def catch_up(self, late: Callable[[int], None]) -> None:
        missed = self.session.rv.catch_up(late) if self._ahead else 0
        if missed:
            self.session.emit("caught_up", missed=missed, step=self.session.rv.step)
        self.round_began = self.session.clock.now()

    # ---------------------------------------------------------------- between rounds, and the end

    def progress(self, inner: int, rate: float) -> None:
        """Goes into the next beat: `inner` steps done of this round, `rate` seconds each."""
        status = self.session.rv.members.status
        status.inner = inner
        status.rate = rate
        self.session.check_alive()
        if self.in_flight is not None and self.in_flight.failed:
            self.in_flight.land()

    def close(self, reason: str) -> None:
        """Say goodbye; the last write of this generation."""
        reason = "done" if self.session.rv.is_done else reason
        self.left = reason != "done"
        self._land_in_time()
        self.session.rv.finish(reason)
        self.session.emit("left", step=self.session.rv.step, reason=reason)
        self.session.end()

    def _land_in_time(self) -> None:
        """End a round under way once its offer is durable; its commit is left to the others."""
        if self.in_flight is not None and not self.in_flight.failed:
            self.session.rv.ask_to_leave()
            with suppress(Leaving):
                self.in_flight.land(self.session.timing.grace)

    # ---------------------------------------------------------------- what the outer loop asks

    @property
    def leaving(self) -> bool:
        return self.session.rv.is_leaving

    @property
    def why(self) -> str:
        """Reason for which this replica leaves, if it does."""
        return self.session.why

    @property
    def fenced(self) -> bool:
        return self.session.rv.members.fenced_by > self.session.rv.generation

    @property
    def behind(self) -> bool:
        return self.session.rv.is_behind

    @property
    def h_cap(self) -> int:
        return self.session.rv.h_cap
