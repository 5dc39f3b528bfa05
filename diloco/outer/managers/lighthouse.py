"""The same training where replicas can reach each other: torchft's own Manager, a Lighthouse and Gloo.

    OuterLoop             LighthouseManager and LighthouseRounds         torchft.Manager
    join()          ──▶   newest snapshot in the bucket, if any
    start_quorum()  ──▶   the participants; heal θ and momentum   ──▶    lighthouse, a peer's HTTP server
    allreduce(Δ)    ──▶   w·Δ and w; w = h/H, or 1 for uniform    ──▶    Gloo
    Work.wait()     ──▶   Σ wΔ / Σ w
    should_commit() ──▶   if False: the model keeps its inner steps; the next inner step repeats the sync
    finish_round()  ──▶   log, heartbeat, and a snapshot if one is due

A replica that was healed in the quorum has weight 0 in that step, because its inner steps began at another θ.
Start the Lighthouse with a join time-out longer than an outer step, because a replica that misses a quorum heals only
in the next quorum.
With a `session` in a bucket, the run keeps run.json, model, logs and snapshots there, but no commits.

Not promised: that late work counts; that a leaving replica's work counts (it leaves at once, and its inner steps
since the last sync are lost); a digest check of θ between replicas; a norm gate; leaving during a wait for a quorum.
"""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import numpy as np
import torch
from torch import Tensor

from diloco.outer.rounds import Work
from diloco.outer.safety import empty_round
from diloco.process.session import Session
from diloco.process.watchdog import Watchdog
from diloco.run.combinations import check_lighthouse
from diloco.run.config import ConfigError, OuterConfig
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import Fenced, GaveUp, Leaving
from rendezvous.records.state import Digests
from rendezvous.snapshots import record as snapshots

if TYPE_CHECKING:
    from torchft import Manager

    from diloco.outer.loop import OuterLoop

TIMEOUT_S = 30.0  # limit for a stalled collective; then the remaining replicas repeat the round
CONNECT_S = 15.0
TROUBLE = (RuntimeError, TimeoutError, ConnectionError)  # the errors of torchft's clients


class LighthouseManager:
    """torchft's eight names over a synchronous torchft.Manager, and its OuterRounds.

    session: writes logs and snapshots to a bucket; None: no bucket, and the caller owns `manager`.
    """

    def __init__(self, manager: "Manager", session: Session | None = None) -> None:
        self._manager = manager
        self.rounds = LighthouseRounds(manager, session)
        self._use_async_quorum = manager._use_async_quorum
        self.current_step = manager.current_step
        self.num_participants = manager.num_participants  # replicas in the newest quorum; 0 before the first one
        self.register_state_dict_fn = manager.register_state_dict_fn
        self.allow_state_dict_read = manager.allow_state_dict_read
        self.disallow_state_dict_read = manager.disallow_state_dict_read

    def start_quorum(self) -> None:
        """Join the quorum of this step, within torchft's quorum time-out. Heal if this replica is behind."""
        with self.rounds.waiting():
            self._ask_torchft(self._manager.start_quorum)

    def allreduce(self, tensor: Tensor, should_quantize: bool = False) -> Work:
        """Send w·Δ and w. The returned Work writes the weighted mean into `tensor`."""
        began = self.rounds.clock.now()
        weight = torch.tensor([self.rounds.weigh_round()], dtype=torch.float32, device="cpu")
        if float(weight) != 1.0:
            tensor.mul_(weight)
        works = [self._manager.allreduce(tensor, should_quantize=should_quantize), self._manager.allreduce(weight)]

        def finish() -> None:
            for work in works:
                work.wait()
            if float(weight) not in (0.0, 1.0):
                tensor.div_(weight)
            self.rounds.spent["mean_s"] = self.rounds.clock.now() - began

        return Work(finish)

    def should_commit(self) -> bool:
        committed = bool(self._ask_torchft(self._manager.should_commit))
        self.rounds.note_vote(committed)
        return committed

    @property
    def done(self) -> bool:
        return self.rounds.done

    @property
    def left(self) -> bool:
        return self.rounds.left

    def _ask_torchft(self, request: Callable[[], Any]) -> Any:
        try:
            return request()
        except TROUBLE as error:
            raise GaveUp(
                f"step {self.current_step()}: torchft's control plane did not answer: {error}. Is the lighthouse up, "
                "and do min_replicas replicas run? Run the same command again to continue"
            ) from error


class LighthouseRounds:
    """The OuterRounds (diloco/outer/managers/protocol.py) of a torchft.Manager."""

    done_with_delta = False  # an aborted collective may still write to Δ
    alone = False

    def __init__(self, manager: "Manager", session: Session | None) -> None:
        self._manager = manager
        self.session = session
        self.stats: Callable[[], dict[str, float]] = dict  # the inner loop's numbers of a round
        self.left = self.behind = False  # behind: the last sync failed, so the next sync is due
        self.clock: Clock = session.clock if session else SystemClock()
        self.watchdog = session.watchdog if session else Watchdog(self.clock)
        self.spent: dict[str, float] = {}
        self._committed = False
        self.round_began = self.clock.now()

    def join(self, loop: "OuterLoop") -> None:
        """Begin at the bucket's newest snapshot. If a peer is at a later step, the first quorum heals this replica."""
        check_lighthouse(loop.outer, OuterConfig())
        self._loop = loop  # no method is called before
        self._manager.register_state_dict_fn(
            "healed", self._after_heal, self._unsent_arrays
        )  # torchft loads θ before it calls this
        if self.session is not None:
            self._resume_from_snapshot(self.session, loop)
        self._digests = Digests(loop.state, loop.rules.fragments)
        self._set_phase("train")
        self.round_began = self.clock.now()

    def _resume_from_snapshot(self, session: Session, loop: "OuterLoop") -> None:
        for snapshot in snapshots.newest_first(session.rv.store):
            arrays = snapshots.load(session.rv.store, snapshot, session.emit, loop.state.all_arrays())
            if arrays is not None:
                loop.state.load(arrays)
                self._manager.load_state_dict({"step": snapshot.t, "batches_committed": 0})
                break
        session.emit("joined", step=self._manager.current_step())
        session.flush()

    def _unsent_arrays(self) -> dict[str, np.ndarray]:
        """Return the outer state's arrays that torchft does not send."""
        arrays = self._loop.state.all_arrays()
        return {k: v.copy() for k, v in arrays.items() if not k.startswith(("theta.", "momentum."))}

    def _after_heal(self, learned: dict[str, np.ndarray]) -> None:
        """Write model ← θ after torchft replaced θ and momentum by a peer's. Our inner steps are discarded."""
        arrays = self._loop.state.all_arrays()
        for name, values in learned.items():
            arrays[name][:] = values
        self._loop.rewrite_all()
        self._digests = Digests(self._loop.state, self._loop.rules.fragments)
        self._emit("healed", step=self._manager.current_step())

    # ---------------------------------------------------------------- what torchft does in a round

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Note that this round's inner steps are done and torchft waits for the other replicas."""
        self._set_phase("wait")
        began = self.clock.now()
        self.spent = {"inner_s": began - self.round_began}
        yield
        self.spent["wait_s"] = self.clock.now() - began

    def weigh_round(self) -> float:
        """Return the weight of this replica's Δ: h/H, or 1 if weighting = "uniform"; 0 if it healed in this round."""
        loop = self._loop
        self.spent["h"] = h = loop.h[self._manager.current_step() % loop.rules.fragments]
        return float(h > 0) if loop.rules.weighting == "uniform" else h / loop.rules.sync_every

    def note_vote(self, committed: bool) -> None:
        """Note whether the outer step is taken.  Without it, the replica syncs again after the next inner step."""
        self._committed = committed
        self.behind = not committed
        if self.behind:
            trouble = str(self._manager.errored() or "too few replicas")
            self._emit("sync_failed", step=self._manager.current_step(), trouble=trouble)

    # ---------------------------------------------------------------- what the outer loop asks

    def offer(self, delta: np.ndarray, h: int) -> None:
        raise AssertionError("no replica is late here: after a missed quorum, the next quorum heals it")

    def finish_round(self) -> int | None:
        """End the round after torchft's hook. Return the fragment whose outer step was just taken, or None."""
        if not self._committed:
            return None
        self._committed = False
        step = self._manager.current_step()
        self._set_phase("train")
        if self.session is not None:
            self._report_step(self.session, step - 1)
            if step % self._loop.rules.snapshot_every == 0 and self._manager.participating_rank() == 0:
                self._write_snapshot(self.session)
        self.round_began = self.clock.now()
        return (step - 1) % self._loop.rules.fragments

    def catch_up(self, late: Callable[[int], None]) -> None:
        """Do nothing: a replica that missed steps heals in the quorum and replays none of them."""

    def progress(self, inner: int, rate: float) -> float:
        """Put the progress into the next heartbeat; raise Fenced or Leaving if this replica must leave.

        The replica leaves in the middle of a round, because no other replica can use its unfinished work."""
        if self.session is None:
            return rate
        status = self.session.rv.members.status
        status.inner = inner
        status.rate = rate
        self.session.check_alive()
        if self.fenced:
            raise Fenced(
                f"{self.session.rv.slot} now belongs to generation {self.session.rv.members.fenced_by}; this one ends"
            )
        if self.leaving:
            raise Leaving(f"{self.session.rv.name} was asked to go; {inner} inner steps since the last sync are lost")
        return rate

    def close(self, reason: str) -> None:
        """Leave the run.  Shut the manager down only if this session made it."""
        self.left = reason != "done"
        if self.session is not None:
            if self.done:
                self._write_snapshot(self.session)
            self.session.emit("left", step=self._manager.current_step(), reason=reason)
            self.session.rv.members.write_leave_beat()
            self.session.end()
            self._manager.shutdown(wait=False)

    @property
    def done(self) -> bool:
        """Whether all wanted outer steps are taken; always False without a session."""
        return self.session is not None and self._manager.current_step() >= self.session.rv.wanted.steps > 0

    @property
    def leaving(self) -> bool:
        return self.session is not None and self.session.rv.is_leaving

    @property
    def why(self) -> str:
        return self.session.why if self.session else ""

    @property
    def fenced(self) -> bool:
        return self.session is not None and self.session.rv.members.fenced_by > self.session.rv.generation

    @property
    def h_cap(self) -> int:
        return self._loop.rules.sync_every

    # ---------------------------------------------------------------- inside

    def _set_phase(self, phase: str) -> None:
        if self.session is not None:
            status = self.session.rv.members.status
            status.phase, status.step, status.inner = phase, self._manager.current_step(), 0
            self.session.rv.step = self._manager.current_step()

    def _emit(self, event: str, **fields: Any) -> None:
        if self.session is not None:
            self.session.emit(event, **fields)

    def _report_step(self, session: Session, step: int) -> None:
        fragment = step % self._loop.rules.fragments
        size = 4 * self._loop.state.size(fragment)
        empty = self._loop.state.optimizers[fragment].stood
        self._digests.renew_fragment(fragment)
        session.emit(
            "step", step=step, listed=self.spent["h"] > 0, theta=self._digests.base, bytes_up=size,
            participants=self._manager.num_participants(), **({"empty": True} if empty else {}),
            **self.spent, **self.stats(),
        )  # fmt: skip
        if empty and self._manager.participating_rank() == 0:
            found = empty_round(step)
            session.emit("warning", kind=found.kind, step=step, steps=1, text=found.text)
        session.flush()

    def _write_snapshot(self, session: Session) -> None:
        state = self._loop.state
        step = self._manager.current_step()
        snapshots.write(session.rv.store, session.clock, step, state.all_arrays(), base=state.digest(), prev=None)
        session.emit("snapshot", step=step)


def connect_lighthouse(url: str, session: Session) -> LighthouseManager:
    """Make this session's torchft.Manager at lighthouse://host:port.   Raises GaveUp if no lighthouse answers there."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    try:
        from torchft import Manager, ProcessGroupGloo
        from torchft.checkpointing.http_transport import HTTPTransport
    except ModuleNotFoundError as missing:
        raise ConfigError(
            f"rendezvous = {url!r} needs torchft ({missing}). It has wheels for Linux on x86-64 and Python up to 3.13 "
            "(pip install 'serverless-diloco[diloco]'). Elsewhere, use the bucket: leave the line out"
        ) from missing

    where = urlsplit(url)
    host = own_address(where.hostname or "", where.port or 0)
    timeout = timedelta(seconds=TIMEOUT_S)

    class Transport(HTTPTransport[Any]):
        def metadata(self) -> str:
            return self.address().replace(socket.gethostname(), host)  # no other machine knows a container's name

    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    try:
        manager = Manager(
            ProcessGroupGloo(timeout=timeout), None, None, session.rv.wanted.min_replicas, use_async_quorum=False,
            timeout=timeout, quorum_timeout=timedelta(seconds=session.timing.give_up), store_addr=host,
            store_port=store.port, connect_timeout=timedelta(seconds=CONNECT_S), rank=0, world_size=1,
            lighthouse_addr=f"http://{where.netloc}", replica_id=session.rv.slot, hostname=host,
            checkpoint_transport=cast("Any", Transport(timeout, num_chunks=0)), init_sync=False,
        )  # fmt: skip
    except TROUBLE as error:
        raise GaveUp(
            f"no lighthouse answers at {url}: {error}. Start one: torchft_lighthouse --min_replicas 1"
        ) from error
    manager._own_store = store  # type: ignore[attr-defined]  # keep it alive as long as the manager
    return LighthouseManager(manager, session)


def own_address(host: str, port: int) -> str:
    """Return the address from which this machine reaches `host`.  Sends nothing.   Raises GaveUp without a route."""
    try:
        with socket.socket(socket.getaddrinfo(host, port)[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
            return probe.getsockname()[0]
    except OSError as error:
        raise GaveUp(f"there is no network route to the lighthouse at {host}:{port}: {error}") from error
