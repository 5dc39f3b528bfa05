"""The eight names that torchft's DiLoCo asks of a Manager, answered from a bucket.

    torchft                        StoreManager                      rendezvous
    start_quorum()            ──▶  (nothing: no server to ask)
    allreduce(Δ)              ──▶  offer ─────────────────────────▶  blob, offer.json
    Work.wait()               ──▶  settle, mean ──────────────────▶  commit.json, blobs
    should_commit()           ──▶  True (bare, after a reported error: False)
    next hook                 ──▶  advance ───────────────────────▶  snapshot, next step

Two ways to use it.  Under `make_diloco` its rounds are those of diloco/outer/rounds.py: the fragments are flat, the
rendezvous holds θ itself, and torchft's DiLoCo has five methods replaced where α = 0 (outer/in_place.py).  Bare, as a
drop-in for `torchft.Manager` under any torchft class, which then runs as it is, its rounds are those of
diloco/outer/managers/bare.py: one blob for all allreduces of a round, and healing through the registered functions.

Under `make_diloco`, `should_commit` is never False: a durable step is never failed.  A bare manager says False to a
caller that has reported an error, and gives it the same step's mean again in the next round.  Only Fenced, Leaving,
Diverged and GaveUp come out of here; all are terminal.  Not promised: several ranks per replica.
"""

import logging
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from diloco.outer.rounds import StoreRounds, Work
from diloco.process.session import Session, ensure_slot, launched_session
from diloco.run.config import FleetConfig, keep_bytes
from rendezvous.agreement.rules import Timing
from rendezvous.clock import Clock, SystemClock
from rendezvous.store import Store
from rendezvous.stores.open import open_store
from rendezvous.stores.signed import run_key, under_key

if TYPE_CHECKING:
    from diloco.outer.managers.bare import BareRounds

logger = logging.getLogger(__name__)


class StoreManager:
    """One replica's Manager.  Claims its slot and beats from construction on.

    run: its URL, an open Store, or a Session that has claimed the slot already.   slot: r00, r01, ….
    rounds: what `make_diloco` joins; until it has, this manager is bare.
    replicas, min_replicas, steps: the desired fleet of a run that has none yet (min_replicas: min(2, replicas)).
    keep, broadcast_weights: as [fleet] of a run.toml (diloco/run/config.py).
    load_state_dict, state_dict: only for a bare manager.
    theta_0: the outer state's arrays as the run began, where every replica has them from elsewhere
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
        most = keep_bytes(keep)
        founds = not isinstance(run, Session)
        if isinstance(run, str) and (held := launched_session(run, slot, steps)) is not None:
            run = held
        if not isinstance(run, Session):
            clock = clock or SystemClock()
            store = under_key(open_store(run) if isinstance(run, str) else run, clock, run_key())
            ensure_slot(store, clock, slot, replicas=replicas, min_replicas=min_replicas, steps=steps)
            run = Session(store, slot, timing or Timing(), clock=clock, keep=most, broadcasts=broadcast_weights)
        self.session = run
        self.rounds = StoreRounds(run, founds=founds, theta_0=theta_0)
        self._states = load_state_dict, state_dict
        self._registered: list[tuple[str, Callable[[Any], None], Callable[[], Any]]] = []

    @cached_property
    def _bare(self) -> "BareRounds":
        """The rounds of a bare manager; `make_diloco` does not use them."""
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
        """Ask nothing: the commit decides which replicas take part.  A bare manager heals here at the latest."""
        if self._is_bare:
            self._bare.join()

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, **_: Any) -> Work:
        """Offer; the Work waits for the decision and writes the mean over `tensor`."""
        return Work(self._bare.add_tensor(tensor) if self._is_bare else self.rounds.average(tensor.detach().numpy()))

    def should_commit(self, *_: Any, **__: Any) -> bool:
        """Always True under `make_diloco`; False for a bare manager's round in which an error was reported."""
        return self._bare.close_round() if self._is_bare else True

    def current_step(self) -> int:
        """Outer steps taken; already one more when should_commit returns."""
        return self.rounds.current_step()

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        """Note the state of a bare manager; torchft registers one under `make_diloco`, too."""
        if "_bare" in vars(self) or any(key == known for known, _, _ in self._registered):
            self._bare.register_state(key, load, save)
        else:
            self._registered.append((key, load, save))

    def allow_state_dict_read(self) -> None:
        """Do nothing: torchft's lock is around a state server, which a bucket does not need."""

    def disallow_state_dict_read(self) -> None:
        """The first hook after a commit: a bare manager's state is complete, so publish it (or heal, at first)."""
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
        """Wait for nothing: the bucket is always there."""

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
        """Note an error outside of the rendezvous, before or after a tensor was averaged.

        A bare manager's next `should_commit` is False: the caller's tensors cannot be trusted, and the same step's
        mean is read again in the next round.  Under `make_diloco` the mean goes from the bucket straight into θ, past
        the caller, so the round goes on.
        """
        self.session.emit("warning", text=f"reported error: {error}")
        if self._is_bare:
            self._bare.error = error
        else:
            logger.warning("reported error (the round goes on): %s", error)

    def shutdown(self, wait: bool = True) -> None:
        """Stop beating.  The slot stays claimed; a successor takes the next generation."""
        self.session.end()
        self.session.rv.members.say_goodbye()

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
    """The notes' name for a Manager without servers: a StoreManager on memory://name."""
    return StoreManager(f"memory://{name}", slot, **settings)
