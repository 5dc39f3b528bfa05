"""The eight names that torchft's DiLoCo asks of a Manager, answered from a bucket.

    torchft                        StoreManager                      rendezvous
    start_quorum()            ──▶  (nothing: nobody to ask)
    allreduce(Δ)              ──▶  offer ─────────────────────────▶  blob, offer.json
    Work.wait()               ──▶  settle, mean ──────────────────▶  commit.json, blobs
    should_commit()           ──▶  True, always
    next hook                 ──▶  advance ───────────────────────▶  snapshot, next step

Two ways to use it.  Under `make_diloco` the fragments are flat and the rendezvous holds θ itself.  Bare, as a drop-in
for `torchft.Manager` under any torchft class, it coalesces the allreduces of a round into one blob and heals through
the registered save and load functions (`diloco.dropin`).

`should_commit` is never False: a durable step is never failed.  Only Fenced, Leaving, Diverged and GaveUp come out of
here; all are terminal.  Not promised: several ranks per replica.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from diloco import dropin
from diloco.launch import agree
from diloco.life import Life, make_room
from rendezvous.clock import Clock, SystemClock
from rendezvous.membership import Wanted
from rendezvous.records import Commit
from rendezvous.rules import Timing
from rendezvous.store import Store, open_store

if TYPE_CHECKING:
    from diloco.outer import OuterLoop

logger = logging.getLogger(__name__)


class Work:
    """What allreduce returns.  After `wait` the tensor is final and every callback has run."""

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

    run: its URL, an open Store, or a Life that has claimed the slot already.   slot: r00, r01, ….
    replicas, min_replicas, steps: first wishes for a run that has none yet (min_replicas: min(2, replicas)).
    load_state_dict, state_dict: only for a bare manager.
    """

    _use_async_quorum = False  # torchft reads this private name; it must be falsy

    def __init__(
        self,
        run: "str | Store | Life",
        slot: str = "r00",
        *,
        replicas: int | None = None,
        min_replicas: int | None = None,
        steps: int | None = None,
        timing: Timing | None = None,
        clock: Clock | None = None,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
    ) -> None:
        if not isinstance(run, Life):
            store = open_store(run) if isinstance(run, str) else run
            clock = clock or SystemClock()
            make_room(store, clock, slot, replicas=replicas, min_replicas=min_replicas, steps=steps)
            run, self._founds = Life(store, slot, timing or Timing(), clock=clock), True
        else:
            self._founds = False  # `diloco train` has written run.json
        self.life = run
        self.stats: Callable[[], dict[str, float]] = dict  # what the inner loop says of a round, asked at each offer
        self.left = False  # did the `with` end because this replica was asked to go?
        self._loop: OuterLoop | None = None
        self._dropin = dropin.DropIn(run, load_state_dict, state_dict)
        self._commit: Commit | None = None  # settled, not yet advanced
        self._spent: dict[str, float] = {}
        self._round_began = run.clock.now()

    # ---------------------------------------------------------------- torchft's eight names

    def start_quorum(self, *_: Any, **__: Any) -> None:
        """Who takes part is decided by the commit; a bare manager heals here at the latest."""
        if self._loop is None:
            self._dropin.join()

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, **_: Any) -> Work:
        """Offer; the Work waits for the decision and writes the mean over `tensor`."""
        if self._loop is None:
            return Work(self._dropin.add(tensor))
        vector = tensor.detach().numpy()
        self.offer(vector, self._loop.h[self.life.rv.fragment])
        return Work(lambda: self._settle(vector))

    def should_commit(self, *_: Any, **__: Any) -> bool:
        if self._loop is None:
            self._dropin.close_round()
        return True

    def current_step(self) -> int:
        """Outer steps taken; already one more when should_commit returns."""
        return self._dropin.step if self._loop is None else self.life.rv.step + (self._commit is not None)

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self._dropin.register(key, load, save)

    def allow_state_dict_read(self) -> None:
        """torchft's lock around its state server; there is none."""

    def disallow_state_dict_read(self) -> None:
        """The first hook after a commit: a bare manager's state is complete, so publish it (or heal, at first)."""
        if self._loop is None:
            self._dropin.join()
            self._dropin.publish()

    # ---------------------------------------------------------------- the rest of a torchft.Manager

    def set_state_dict_fns(self, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        self._dropin.register("default", load, save)

    def _manager_state_dict(self) -> dict[str, Any]:
        return {"user": self._dropin.states(), "torchft": self.state_dict()}

    def state_dict(self) -> dict[str, int]:
        return {"step": self.current_step(), "batches_committed": self.batches_committed()}

    def wait_quorum(self) -> None:
        """Nothing to wait for: the bucket is always there."""

    def num_participants(self) -> int:
        """Fresh offers in the last commit that this replica knows."""
        last = self.life.rv.chain.known(self.current_step() - 1)
        return len(last.fresh) if last else 0

    def batches_committed(self) -> int:
        return self.current_step()

    def is_participating(self) -> bool:
        return True

    def errored(self) -> Exception | None:
        return None

    def report_error(self, error: Exception) -> None:
        """A round is repaired by reading again, never failed: what is durable counts."""
        logger.warning("reported error (the round goes on): %s", error)
        self.life.tell("warning", text=f"reported error: {error}")

    def shutdown(self, wait: bool = True) -> None:
        """Stop beating.  The slot stays claimed; a successor takes the next generation."""
        self.life.end()
        self.life.rv.members.goodbye()

    # ---------------------------------------------------------------- for the outer loop

    def join(self, loop: "OuterLoop") -> None:
        """Heal: afterwards the loop's θ is the run's.   Raises WrongRun."""
        from diloco.outer import layout_of  # outer names this class

        rv, self._loop = self.life.rv.under(loop.rules), loop
        if self._founds:
            agree(rv.store, self.life.clock, loop.mathematics(), layout_of(loop.model))
        rv.join(loop.state)
        self.life.tell("joined", step=rv.step)
        self.life.flush()
        self._round_began = self.life.clock.now()

    def offer(self, delta: np.ndarray, h: int) -> None:
        """Make Δ durable for the open step; leaves if this replica is asked to go."""
        stats, began = self.stats(), self.life.clock.now()
        self._spent = {"inner_s": began - self._round_began}
        self.life.rv.offer(delta, h, samples=stats.get("samples", 0.0), stats=stats)
        self._spent["offer_s"] = self.life.clock.now() - began

    def _settle(self, out: np.ndarray) -> None:
        began = self.life.clock.now()
        commit = self.life.rv.settle()
        settled = self.life.clock.now()
        self.life.rv.mean(commit, out)
        self._spent |= {"wait_s": settled - began, "mean_s": self.life.clock.now() - settled}
        self._commit = commit

    def finish_round(self) -> int | None:
        """After torchft's hook: the fragment whose outer step was just taken, or None."""
        if self._commit is None:
            return None
        commit, self._commit = self._commit, None
        fragment = self.life.rv.fragment
        self.life.rv.advance(commit)
        self._report(commit)
        return fragment

    def catch_up(self, late: Callable[[int], None]) -> None:
        missed = self.life.rv.catch_up(late)
        if missed:
            self.life.tell("caught_up", missed=missed, step=self.life.rv.step)
        self._round_began = self.life.clock.now()

    def progress(self, inner: int, rate: float) -> None:
        """Goes into the next beat: `inner` steps done of this round, `rate` seconds each."""
        status = self.life.rv.members.status
        status.inner, status.rate = inner, rate

    def close(self, reason: str) -> None:
        """Say goodbye; the last write of this generation."""
        self.left = reason != "done"
        self.life.rv.finish(reason)
        self.life.tell("left", step=self.life.rv.step, reason=reason)
        self.life.end()

    # ---------------------------------------------------------------- what others ask

    def ask_to_leave(self) -> None:
        self.life.rv.ask_to_leave()

    @property
    def slot(self) -> str:
        return self.life.rv.slot

    @property
    def generation(self) -> int:
        return self.life.rv.generation

    @property
    def store(self) -> Store:
        return self.life.rv.store

    @property
    def wanted(self) -> Wanted:
        return self.life.rv.wanted

    @property
    def done(self) -> bool:
        """Has the run all the outer steps that are wanted?"""
        return self.life.rv.done

    @property
    def leaving(self) -> bool:
        return self.life.rv.leaving

    @property
    def fenced(self) -> bool:
        return self.life.rv.members.fenced_by > self.life.rv.generation

    @property
    def behind(self) -> bool:
        return self.life.rv.behind

    @property
    def h_cap(self) -> int:
        return self.life.rv.h_cap

    def _report(self, commit: Commit) -> None:
        offer = self.life.rv.last_offer
        mine = offer if offer is not None and offer.step == commit.t else None
        stats = mine.stats if mine else {}
        self.life.tell(
            "step", step=commit.t, h=mine.h if mine else 0, listed=commit.lists(commit.t, self.slot),
            theta=self.life.rv.base, bytes_up=mine.size if mine else 0,
            bytes_down=sum(o.size for o in commit.offers), **self._spent, **stats,
        )  # fmt: skip
        if self.life.rv.idle_steps in (3, 6, 12, 24) or (self.life.rv.idle_steps and self.life.rv.idle_steps % 50 == 0):
            self.life.tell("nothing_learned", steps=self.life.rv.idle_steps, cause=likely_cause(stats))
        self.life.flush()


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
