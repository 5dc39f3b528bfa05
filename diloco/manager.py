"""The eight names that torchft's DiLoCo asks of a Manager, answered from a bucket.

    torchft                        StoreManager                      rendezvous
    start_quorum()            ──▶  (nothing: nobody to ask)
    allreduce(Δ)              ──▶  offer ─────────────────────────▶  blob, offer.json
    Work.wait()               ──▶  settle, mean ──────────────────▶  commit.json, blobs
    should_commit()           ──▶  True (bare, after a reported error: False)
    next hook                 ──▶  advance ───────────────────────▶  snapshot, next step

Two ways to use it.  Under `make_diloco` the fragments are flat, the rendezvous holds θ itself, and torchft's DiLoCo has
five methods replaced where α = 0 (diloco/in_place.py).  Bare (diloco/bare_manager.py), as a drop-in for
`torchft.Manager` under any torchft class, which then runs as it is, it coalesces the allreduces of a round into one
blob and heals through the registered save and load functions.

Under `make_diloco`, `should_commit` is never False: a durable step is never failed.  A bare manager says False to a
caller that has reported an error, and gives it the same step's mean again in the next round.  Only Fenced, Leaving,
Diverged and GaveUp come out of here; all are terminal.  Not promised: several ranks per replica.
"""

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from diloco import bare_manager
from diloco.config import AUTO, FleetConfig, OuterConfigError, keep_bytes
from diloco.flat import layout_of
from diloco.host import device_name
from diloco.launch import agree_on_run, solo_warning
from diloco.model_checks import frozen_digest
from diloco.safety import Finding, Tracker, moved_share, replica_findings
from diloco.session import Session, ensure_slot
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import Leaving
from rendezvous.membership import Wanted
from rendezvous.records import Commit, Offer
from rendezvous.rules import Rules, Timing
from rendezvous.seal import run_key, under_key
from rendezvous.store import Store
from rendezvous.stores.open import open_store

if TYPE_CHECKING:
    from diloco.outer import OuterLoop

logger = logging.getLogger(__name__)


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
        """Its commit, or None if it is not there in time.   Raises what ended the round."""
        self._thread.join(timeout_s)
        if self._error is not None:
            raise self._error
        return self._commit


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


class StoreManager:
    """One replica's Manager.  Claims its slot and beats from construction on.

    run: its URL, an open Store, or a Session that has claimed the slot already.   slot: r00, r01, ….
    replicas, min_replicas, steps: the desired fleet of a run that has none yet (min_replicas: min(2, replicas)).
    keep: what stays in the bucket, as fleet.keep of a run.toml (diloco/config.py).
    load_state_dict, state_dict: only for a bare manager.
    theta_0: the outer state's arrays as the run began, where every replica has them from elsewhere
    (diloco/start_model.py).
    """

    _use_async_quorum = False  # torchft reads this private name; it must be falsy
    done_with_delta = True

    def __init__(
        self,
        run: "str | Store | Session",
        slot: str = "r00",
        *,
        replicas: int | None = None,
        min_replicas: int | None = None,
        steps: int | None = None,
        keep: int | str = FleetConfig.keep,
        timing: Timing | None = None,
        clock: Clock | None = None,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        theta_0: Callable[[], dict[str, np.ndarray]] | None = None,
    ) -> None:
        most = keep_bytes(keep)
        if not isinstance(run, Session):
            clock = clock or SystemClock()
            store = under_key(open_store(run) if isinstance(run, str) else run, clock, run_key())
            ensure_slot(store, clock, slot, replicas=replicas, min_replicas=min_replicas, steps=steps)
            run = Session(store, slot, timing or Timing(), clock=clock, keep=most)
            self._founds = True
        else:
            self._founds = False  # `diloco train` has written run.json
        self.session = run
        self.watchdog = run.watchdog
        self._theta_0 = theta_0
        self.stats: Callable[[], dict[str, float]] = dict  # what the inner loop says of a round, asked at each offer
        self.left = False  # did the `with` end because this replica was asked to go?
        self._loop: OuterLoop | None = None
        self._bare = bare_manager.BareRounds(run, load_state_dict, state_dict)
        self._tracker = Tracker([], 0.0, Rules())
        self._samples: list[float] = []  # of each fragment, since its last offer
        self._commit: Commit | None = None  # settled, not yet advanced
        self._in_flight: InFlightRound | None = None
        self._ahead = True  # may the next step be decided already?  If not, the beat will show it
        self._spent: dict[str, float] = {}
        self._round_began = run.clock.now()

    # ---------------------------------------------------------------- torchft's eight names

    def start_quorum(self, *_: Any, **__: Any) -> None:
        """Nothing to ask: the commit decides which replicas take part.  A bare manager heals here at the latest."""
        if self._loop is None:
            self._bare.join()

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, **_: Any) -> Work:
        """Offer; the Work waits for the decision and writes the mean over `tensor`."""
        if self._loop is None:
            return Work(self._bare.add_tensor(tensor))
        vector = tensor.detach().numpy()
        offer = self._prepare_offer(vector, self._loop.h[self.session.rv.fragment])
        if not self._loop.overlaps:
            offer()
            return Work(lambda: self._keep_commit(self._settle_mean(vector)))

        def run_round() -> Commit:
            offer()
            commit = self._settle_mean(vector)
            self._ahead = self.session.rv.chain.read(commit.t + 1) is not None  # here it holds nobody up
            return commit

        self._in_flight = flight = InFlightRound(run_round)
        return Work(lambda: self._keep_commit(flight.land()))

    def should_commit(self, *_: Any, **__: Any) -> bool:
        """Always True under `make_diloco`; False for a bare manager's round in which an error was reported."""
        return True if self._loop is not None else self._bare.close_round()

    def current_step(self) -> int:
        """Outer steps taken; already one more when should_commit returns."""
        return self._bare.step if self._loop is None else self.session.rv.step + (self._commit is not None)

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self._bare.register_state(key, load, save)

    def allow_state_dict_read(self) -> None:
        """torchft's lock around its state server; there is none."""

    def disallow_state_dict_read(self) -> None:
        """The first hook after a commit: a bare manager's state is complete, so publish it (or heal, at first)."""
        if self._loop is None:
            self._bare.join()
            self._bare.publish_states()

    # ---------------------------------------------------------------- the rest of a torchft.Manager

    def set_state_dict_fns(self, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self._bare.register_state("default", load, save)

    def _manager_state_dict(self) -> dict[str, Any]:
        return {"user": self._bare.read_states(), "torchft": self.state_dict()}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.current_step(), "batches_committed": self.batches_committed()}

    def wait_quorum(self) -> None:
        """Nothing to wait for: the bucket is always there."""

    def num_participants(self) -> int:
        """Fresh offers in the last commit that this replica knows."""
        last = self.session.rv.chain.known_commit(self.current_step() - 1)
        return len(last.fresh_offers) if last else 0

    def batches_committed(self) -> int:
        return self.current_step()

    def is_participating(self) -> bool:
        return True

    def errored(self) -> Exception | None:
        """The error that was reported in this round of a bare manager."""
        return self._bare.error

    def report_error(self, error: Exception) -> None:
        """Something went wrong outside of the rendezvous, after or before a tensor was averaged.

        A bare manager's next `should_commit` is False: what its caller holds cannot be trusted, and the same step's
        mean is read again in the next round.  Under `make_diloco` the mean goes from the bucket into θ without
        passing anybody's hands, so the round goes on.
        """
        self.session.emit("warning", text=f"reported error: {error}")
        if self._loop is None:
            self._bare.error = error
        else:
            logger.warning("reported error (the round goes on): %s", error)

    def shutdown(self, wait: bool = True) -> None:
        """Stop beating.  The slot stays claimed; a successor takes the next generation."""
        self.session.end()
        self.session.rv.members.say_goodbye()

    # ---------------------------------------------------------------- for the outer loop

    def join(self, loop: "OuterLoop") -> None:
        """Heal: afterwards the loop's θ is the run's.   Raises WrongRun."""
        rv = self.session.rv
        self._loop = loop
        if self._founds:
            stands = agree_on_run(
                rv.store, self.session.clock, loop.mathematics(), layout_of(loop.model),
                frozen=frozen_digest(loop.model), replicas=self.wanted.replicas,
            )  # fmt: skip
            loop.rules = replace(loop.rules, codec=stands.codec)
            self._warn_of_solo()
            self.session.emit("codec", codec=stands.codec, why=stands.why_codec or "as asked for")
        if loop.rules.codec == AUTO:
            raise OuterConfigError(
                'outer.codec = "auto" is decided when a run is founded, and this manager was given a claimed slot of a '
                "run that stands. Name the codec of that run (run.json has it)"
            )
        rv.set_rules(loop.rules)
        outer = loop.state.optimizers
        sizes = [loop.state.size(f) for f in range(len(outer))]
        self._tracker = Tracker(sizes, outer[0].param_groups[0]["momentum"], loop.rules)
        self._samples = [0.0] * len(sizes)
        rv.join(loop.state, self._theta_0)
        self.session.emit("joined", step=rv.step)
        self.session.flush()
        self._round_began = self.session.clock.now()

    def offer(self, delta: np.ndarray, h: int) -> None:
        """Make Δ durable for the open step; leaves if this replica is asked to go."""
        self._prepare_offer(delta, h)()

    def _prepare_offer(self, delta: np.ndarray, h: int) -> Callable[[], None]:
        """Take the stats that go with Δ now; -> the call that makes it durable."""
        stats = {**self.stats(), "moved": moved_share(delta)}
        began = self.session.clock.now()
        self._spent = {"inner_s": began - self._round_began}
        theta = self._loop.thetas[self.session.rv.fragment].numpy() if self._loop else None
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
        self._tracker.mean(commit, out)
        return commit

    def _keep_commit(self, commit: Commit | None) -> None:
        self._commit = commit
        self._in_flight = None

    def finish_round(self) -> int | None:
        """After torchft's hook: the fragment whose outer step was just taken, or None."""
        if self._commit is None:
            return None
        commit = self._commit
        self._commit = None
        fragment = self.session.rv.fragment
        self.session.rv.advance(commit)
        self._report_step(commit)
        return fragment

    def catch_up(self, late: Callable[[int], None]) -> None:
        missed = self.session.rv.catch_up(late) if self._ahead else 0
        if missed:
            self.session.emit("caught_up", missed=missed, step=self.session.rv.step)
        self._round_began = self.session.clock.now()

    def progress(self, inner: int, rate: float) -> None:
        """Goes into the next beat: `inner` steps done of this round, `rate` seconds each."""
        status = self.session.rv.members.status
        status.inner = inner
        status.rate = rate
        self.session.check_alive()
        if self._in_flight is not None and self._in_flight.failed:
            self._in_flight.land()

    def close(self, reason: str) -> None:
        """Say goodbye; the last write of this generation."""
        reason = "done" if self.done else reason
        self.left = reason != "done"
        self._land_in_time()
        self.session.rv.finish(reason)
        self.session.emit("left", step=self.session.rv.step, reason=reason)
        self.session.end()

    def _land_in_time(self) -> None:
        """A round under way ends when its offer is durable; what was decided then is for the others."""
        if self._in_flight is not None and not self._in_flight.failed:
            self.session.rv.ask_to_leave()
            with suppress(Leaving):
                self._in_flight.land(self.session.timing.grace)

    # ---------------------------------------------------------------- what others ask

    def ask_to_leave(self) -> None:
        self.session.rv.ask_to_leave()

    @property
    def slot(self) -> str:
        return self.session.rv.slot

    @property
    def generation(self) -> int:
        return self.session.rv.generation

    @property
    def store(self) -> Store:
        return self.session.rv.store

    @property
    def wanted(self) -> Wanted:
        return self.session.rv.wanted

    @property
    def done(self) -> bool:
        """Has the run all the outer steps that are desired?"""
        return self.session.rv.is_done

    @property
    def leaving(self) -> bool:
        return self.session.rv.is_leaving

    @property
    def why(self) -> str:
        """Why this replica leaves, if it does."""
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

    def _report_step(self, commit: Commit) -> None:
        offer = self.session.rv.last_offer
        fragment = commit.t % self.session.rv.rules.fragments
        mine = offer if offer is not None and offer.step == commit.t else None
        stats = mine.stats if mine else {}
        assert self._loop is not None
        outer = self._loop.state.optimizers[fragment]
        numbers = self._tracker.step(outer.param_groups[0]["lr"])
        self.session.emit(
            "step", step=commit.t, device=device_name(), h=mine.h if mine else 0,
            listed=commit.lists_offer(commit.t, self.slot), theta=self.session.rv.base,
            bytes_up=mine.size if mine else 0, bytes_down=sum(o.size for o in commit.offers),
            delta_norm=mine.norm if mine else 0.0,
            **numbers, **({"empty": True} if outer.stood else {}), **self._spent, **stats,
        )  # fmt: skip
        idle_steps = self.session.rv.idle_steps
        if idle_steps in (3, 6, 12, 24) or (idle_steps and idle_steps % 50 == 0):
            self.session.emit("nothing_learned", steps=idle_steps, cause=likely_cause(stats))
        self._warn_of_findings(commit, self._about_mine(mine, fragment) if mine else [])
        if self._loop.overlaps:
            self.session.flush_soon()
        else:
            self.session.flush()

    def _about_mine(self, mine: Offer, fragment: int) -> list[Finding]:
        if self.session.rv.idle_steps:  # all of them have zeros: that is said as such
            return []
        small = self._loop is not None and any(p.dtype.itemsize < 4 for p in self._loop.fragments[fragment].live)
        return replica_findings(mine.stats, mine.h, mine.zero, small)

    def _warn_of_findings(self, commit: Commit, about_mine: list[Finding]) -> None:
        """Each replica warns of its own offer, and the committer of the commit."""
        for finding, steps in self._tracker.findings(commit, self.wanted.replicas, about_mine):
            if finding in about_mine or commit.by == self.session.rv.name:
                self.session.emit("warning", kind=finding.kind, step=commit.t, steps=steps, text=finding.text)

    def _warn_of_solo(self) -> None:
        if text := solo_warning(self.wanted):
            self.session.emit("warning", kind="solo", text=text)


def MockManager(name: str = "mock", slot: str = "r00", **settings: Any) -> StoreManager:
    """The notes' name for a Manager without servers: a StoreManager on memory://name."""
    return StoreManager(f"memory://{name}", slot, **settings)


def likely_cause(stats: dict[str, float]) -> str:
    """Why a fleet's pseudogradients may all be zero, from what the inner loop measured."""
    if stats.get("lr") == 0:
        return "the learning rate is 0: look at inner.lr and its schedule"
    if stats.get("reward_std") == 0 or ("reward" in stats and stats.get("grad_norm") == 0):
        level = stats.get("reward", 0.0)
        return f"every group's rewards are equal (mean {level:.2f}), so no advantage: the task is too hard or too easy"
    if stats.get("grad_norm") == 0:
        return "all gradients are 0: is the loss connected to trainable parameters?"
    rate = f"a learning rate of {stats['lr']:g} may be too small for their dtype" if "lr" in stats else "look at the lr"
    return f"parameters did not change: {rate}, or the optimizer does not hold the model's parameters"
