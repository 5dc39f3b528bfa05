"""The outer rounds of one replica on a bucket: the calls of an OuterLoop beside torchft's eight names.

    join(loop)       ──▶  load the run's θ into the loop                       snapshot, commits
    average(Δ)       ──▶  offer; then, when the caller waits: settle, mean     blob, offer.json ─▶ commit.json, blobs
    finish_round()   ──▶  advance, report (step_report.py)                     snapshot, next step; the log
    catch_up(late)   ──▶  apply the steps that were committed meanwhile
    progress, close  ──▶                                                       heartbeat, last heartbeat

If inner steps continue during a fragment's transfer, `average` runs the round in a thread of its own, and
`finish_round` takes the outer step after the thread has ended.

Not promised: two rounds at the same time; torchft waits for a round before it begins the next round.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from diloco.outer.flat import layout_of
from diloco.outer.safety import moved_share
from diloco.outer.step_report import StepReport
from diloco.process.session import Session
from diloco.run.config import AUTO, OuterConfigError
from rendezvous.errors import Leaving
from rendezvous.records.records import Commit

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop


class Work:
    """The handle that allreduce returns.  After `wait`, the tensor is final and every callback has run."""

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
    """A round that runs in a thread of its own while inner steps continue."""

    def __init__(self, fly: Callable[[], Commit]) -> None:
        self._fly = fly
        self._commit = self._error = None
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
        """Return the round's commit, or None after `timeout_s`.   Raises the error that ended the round."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return self._commit


class StoreRounds:
    """The OuterRounds (diloco/outer/managers/protocol.py) of one claimed slot.

    founds: `join` writes run.json if it is missing. If False, `diloco train` has written run.json.
    theta_0: returns the outer state's arrays of step 0, if every replica can get them outside the bucket
    (diloco/model/start_model.py).
    """

    done_with_delta = True
    alone = False

    def __init__(
        self, session: Session, *, founds: bool, theta_0: Callable[[], dict[str, np.ndarray]] | None = None
    ) -> None:
        self.session = session
        self.watchdog = session.watchdog
        self.stats: Callable[[], dict[str, float]] = dict  # the inner loop's numbers of a round, read at each offer
        self.left = False  # whether the `with` ended because this replica was asked to leave
        self.loop: OuterLoop | None = None  # None: no loop has joined
        self.in_flight: InFlightRound | None = None
        self.founds = founds
        self.frozen: str | None = None  # the digest, if the ranks have computed it
        self._theta_0 = theta_0
        self._report: StepReport | None = None
        self._samples: list[float] = []  # samples of each fragment since its last offer
        self._commit: Commit | None = None  # the settled commit whose outer step is not taken yet
        self._ahead = True  # whether the next step may be committed already
        self._spent: dict[str, float] = {}
        self.round_began = session.clock.now()

    # ---------------------------------------------------------------- before the first round

    def join(self, loop: "OuterLoop") -> None:
        """Heal the loop: load the run's θ.   Raises WrongRun."""
        rv = self.session.rv
        self.loop = loop
        if self.founds:
            from diloco.outer.found import found_run

            found_run(self.session, loop, self.frozen)
        if loop.rules.codec == AUTO:
            raise OuterConfigError(
                'outer.codec = "auto" is decided when a run is created, and this manager has a claimed slot of an '
                "existing run. Name the codec of that run (run.json has it)"
            )
        rv.set_rules(loop.rules)
        self._report = StepReport(self.session, loop)
        self._samples = [0.0] * loop.rules.fragments
        rv.join(loop.state, self._theta_0)
        rv.baggage = self._pack_moments
        if self.session.weights is not None:
            self.session.weights.layout = layout_of(loop.model)
        self.session.emit("joined", step=rv.step)
        if rv.inherited:
            from diloco.outer.moments import unpack_moments

            unpack_moments(self.session, loop)
        self.session.flush()
        self.round_began = self.session.clock.now()

    def _pack_moments(self) -> dict[str, np.ndarray]:
        """Return the optimizer's moments for the next session of this slot."""
        from diloco.outer.moments import pack_moments

        assert self.loop is not None, "join comes first"
        return pack_moments(self.session, self.loop)

    # ---------------------------------------------------------------- a round

    def average(self, delta: np.ndarray) -> Callable[[], None]:
        """Offer Δ. Return the call that waits for the commit and writes the mean over Δ."""
        loop = self.loop
        assert loop is not None, "join comes first"
        offer = self._prepare_offer(delta, loop.h[self.session.rv.fragment])
        if not loop.overlaps:
            offer()
            return lambda: self._keep_commit(self._settle_mean(delta))

        def run_round() -> Commit:
            offer()
            commit = self._settle_mean(delta)
            self._ahead = self.session.rv.chain.read(commit.t + 1) is not None  # this read delays no inner step
            return commit

        self.in_flight = flight = InFlightRound(run_round)
        return lambda: self._keep_commit(flight.land())

    def offer(self, delta: np.ndarray, h: int) -> None:
        """Offer Δ for the open step, durably.   Raises Leaving if a leaving replica's grace ends before."""
        self._prepare_offer(delta, h)()

    def _prepare_offer(self, delta: np.ndarray, h: int) -> Callable[[], None]:
        """Take the stats of Δ now. Return the call that offers Δ."""
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
        """Return the number of samples in the offered Δ: in all rounds since its fragment's last offer."""
        self._samples = [n + stats.get("samples", 0.0) for n in self._samples]
        fragment = self.session.rv.fragment
        inside, self._samples[fragment] = self._samples[fragment], 0.0
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
        self._commit, self.in_flight = commit, None

    def current_step(self) -> int:
        """Return the number of outer steps taken, including a settled one."""
        return self.session.rv.step + (self._commit is not None)

    def finish_round(self) -> int | None:
        """End the round after torchft's hook. Return the fragment whose outer step was just taken, or None."""
        if self._commit is None:
            return None
        commit, self._commit = self._commit, None
        rv = self.session.rv
        fragment = rv.fragment
        self.alone = is_alone(commit, (rv.slot, rv.generation), rv.rules.codec)
        rv.advance(commit)
        assert self._report is not None
        self._report.emit_step(commit, self._spent)
        return fragment

    def catch_up(self, late: Callable[[int], None]) -> None:
        if self._ahead and (missed := self.session.rv.catch_up(late)):
            self.session.emit("caught_up", missed=missed, step=self.session.rv.step)
        self.round_began = self.session.clock.now()

    # ---------------------------------------------------------------- between rounds, and the end

    def progress(self, inner: int, rate: float) -> float:
        """Put into the next heartbeat: `inner` steps are done in this round, at `rate` seconds per step."""
        status = self.session.rv.members.status
        status.inner, status.rate = inner, rate
        self.session.check_alive()
        if self.in_flight is not None and self.in_flight.failed:
            self.in_flight.land()
        return rate

    def close(self, reason: str) -> None:
        """Leave the run: the last write of this generation."""
        rv = self.session.rv
        self.left = reason != "done" and not rv.is_done
        ended = "done" if rv.is_done or not rv.wanted.steps else "its training ended before the run was done"
        reason = reason if self.left else ended
        self._land_in_time()
        rv.finish(reason)
        self.session.emit("left", step=rv.step, reason=reason)
        self.session.end()

    def _land_in_time(self) -> None:
        """Stop a running round as soon as its offer is durable. The other replicas write its commit."""
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
        """Return this replica's reason to leave."""
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


def is_alone(commit: Commit, session: tuple[str, int], codec: str) -> bool:
    """Whether a commit's mean is the pseudogradient of this session (slot, generation), without a loss."""
    return codec == "fp32" and [(o.slot, o.generation, o.factor) for o in commit.offers] == [(*session, 1.0)]
