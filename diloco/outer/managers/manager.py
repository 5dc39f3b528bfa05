"""A Manager over a bucket: the eight methods that torchft's DiLoCo calls.

    torchft                        StoreManager                      rendezvous
    start_quorum()            ──▶  (nothing: a bucket has no quorum)
    allreduce(Δ)              ──▶  offer ─────────────────────────▶  blob, offer.json
    Work.wait()               ──▶  settle, mean ──────────────────▶  commit.json, blobs
    should_commit()           ──▶  True (bare, after a reported error: False)
    next hook                 ──▶  advance ───────────────────────▶  snapshot, next step

You can use it in two ways:

    under `make_diloco`   rounds of diloco/outer/rounds.py: flat fragments, and the rendezvous holds θ itself. With
                          α = 0, five methods of torchft's DiLoCo are replaced (outer/fragments/in_place.py)
    bare                  in place of a `torchft.Manager` under any unmodified torchft class. Rounds of bare.py: one
                          blob for all allreduces of a round, and healing through the registered functions

Under `make_diloco`, `should_commit` is never False, because a durable step cannot fail.  A bare manager returns False
after a reported error, and returns the same step's mean again in the next round. Both managers raise a RendezvousError
(Fenced, Diverged, BadDelta, …), which ends the replica.  Not promised: several ranks per replica.
"""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from diloco.outer.rounds import StoreRounds, Work
from diloco.process.session import Session
from diloco.run.config import FleetConfig
from diloco.run.sections import keep_bytes
from rendezvous.agreement.rules import Timing
from rendezvous.clock import Clock, SystemClock
from rendezvous.store import Store

if TYPE_CHECKING:
    from diloco.outer.managers.bare import BareRounds

logger = logging.getLogger(__name__)


class StoreManager:
    """One replica's Manager.  Its constructor claims the slot and starts the heartbeats.

    run: its URL, an open Store, or a Session that has claimed the slot.   slot: r00, r01, …, or "auto", a free one.
    rounds: the object that `make_diloco` joins; before that, this manager is bare.
    replicas, min_replicas, steps: the desired fleet of a new run (min_replicas: min(2, replicas)).
    keep, broadcast_weights: as in [fleet] of a run.toml (diloco/run/config.py).
    load_state_dict, state_dict: only for a bare manager.
    theta_0: returns the outer state's arrays of step 0, if every replica can get them outside the bucket
    (diloco/model/start_model.py).
    """

    _use_async_quorum = False  # torchft reads this private name; it must be falsy

    def __init__(
        self,
        run: "str | Store | Session",
        slot: str = "r00",
        *,
        replicas: int | None = None,
        min_replicas: int | None = None,
        steps: int | None = None,
        keep: int | str = FleetConfig.keep,
        broadcast_weights: bool = False,
        timing: Timing | None = None,
        clock: Clock | None = None,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        theta_0: Callable[[], dict[str, np.ndarray]] | None = None,
    ) -> None:
        founds = not isinstance(run, Session)
        if not isinstance(run, Session):
            from diloco.run.library import open_session

            desired = {"replicas": replicas, "min_replicas": min_replicas, "steps": steps}
            settings = {"keep": keep_bytes(keep), "broadcasts": broadcast_weights, "timing": timing or Timing()}
            run = open_session(run, slot, clock or SystemClock(), desired, **settings)
        self.session = run
        self.rounds = StoreRounds(run, founds=founds, theta_0=theta_0)
        self._states = load_state_dict, state_dict
        self._registered: list[tuple[str, Callable[[Any], None], Callable[[], Any]]] = []

    @cached_property
    def _bare(self) -> "BareRounds":
        """The rounds of a bare manager, which `make_diloco` does not use."""
        from diloco.outer.managers.bare import BareRounds

        rounds = BareRounds(self.session, *self._states)
        for key, load, save in self._registered:
            rounds.register_state(key, load, save)
        return rounds

    @property
    def _is_bare(self) -> bool:
        return self.rounds.loop is None

    # ---------------------------------------------------------------- torchft's eight names

    def start_quorum(self, *_: Any, **__: Any) -> None:
        """Send no request: the commit decides which replicas take part.  A bare manager heals here at the latest."""
        if self._is_bare:
            self._bare.join()

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, **_: Any) -> Work:
        """Offer `tensor`. The returned Work waits for the commit and writes the mean into `tensor`."""
        return Work(self._bare.add_tensor(tensor) if self._is_bare else self.rounds.average(tensor.detach().numpy()))

    def should_commit(self, *_: Any, **__: Any) -> bool:
        """Return True; False only for a bare manager's round with a reported error."""
        return self._bare.close_round() if self._is_bare else True

    def current_step(self) -> int:
        """Return the number of outer steps taken, including the step that should_commit has just confirmed."""
        return self.rounds.current_step()

    batches_committed = current_step  # another of torchft's names

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Register a state of a bare manager. Under `make_diloco`, torchft registers its own state, without effect."""
        if "_bare" in vars(self) or any(key == known for known, _, _ in self._registered):
            self._bare.register_state(key, load, save)
        else:
            self._registered.append((key, load, save))

    def allow_state_dict_read(self) -> None:
        """Do nothing: torchft locks a state server, which a bucket does not need."""

    def disallow_state_dict_read(self) -> None:
        """Publish a bare manager's state, complete in torchft's first call after a commit. The very first heals."""
        if self._is_bare:
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
        """Return at once: a bucket needs no quorum."""

    def num_participants(self) -> int:
        """Return the number of fresh offers in the last commit that this replica knows."""
        last = self.session.rv.chain.known_commit(self.current_step() - 1)
        return len(last.fresh_offers) if last else 0

    def is_participating(self) -> bool:
        return True

    def errored(self) -> Exception | None:
        """Return the error that the caller of a bare manager reported in this round."""
        return self._bare.error

    def report_error(self, error: Exception) -> None:
        """Note an error outside of the rendezvous, before or after a tensor was averaged.

        A bare manager's next `should_commit` returns False, because the caller's tensors may be wrong. The next round
        reads the same step's mean again.  Under `make_diloco`, the mean is read from the bucket straight into θ, not
        through the caller's tensors, so the round continues.
        """
        self.session.emit("warning", text=f"the training loop reported an error: {error}")
        if self._is_bare:
            self._bare.error = error
        else:
            logger.warning("the training loop reported an error, and the round continues: %s", error)

    def shutdown(self, wait: bool = True) -> None:
        """Stop the heartbeats.  The slot stays claimed; a successor takes the next generation."""
        self.session.end()
        self.session.rv.members.write_leave_beat()

    # ---------------------------------------------------------------- what others ask

    def ask_to_leave(self, why: str = "asked to leave") -> None:
        self.session.ask_to_leave(why)

    @property
    def store(self) -> Store:
        return self.session.rv.store

    @property
    def done(self) -> bool:
        """Whether the run has all wanted outer steps."""
        return self.session.rv.is_done

    @property
    def left(self) -> bool:
        """Whether the `with` of make_diloco ended because this replica was asked to go."""
        return self.rounds.left


def MockManager(name: str = "mock", slot: str = "r00", **settings: Any) -> StoreManager:
    """Make a Manager without servers: a StoreManager on memory://name."""
    return StoreManager(f"memory://{name}", slot, **settings)
