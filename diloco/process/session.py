"""One session of a slot. It claims the slot, writes heartbeats and can leave.  It exists before torch is imported.

    Session(store, "r01") ── claim ── journal ── beat thread ──▶ … ── ask_to_leave() ── end()

In each turn, the beat thread ticks the membership (agreement/membership.py) and checks three reasons to end:

    control: until ──▶ passed, not extended ─────▶ leave, with the work done so far; by force after ORPHAN_GRACE_S
    launcher gone ───────────────────────────────▶ the same, and its inner step may end first
    watchdog: an inner step that hangs ──────────▶ log where it hangs, end the process

A part of a turn that fails does not stop the other parts.  If the thread fails, the session ends at its next inner
step or in its wait; by force after ORPHAN_GRACE_S, and at once if a turn hangs.

Not promised: an end at the exact second; the inner step ends first, and this machine's clock may be wrong.
"""

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from diloco.process import exitcodes
from diloco.process.journal import Journal
from diloco.process.processes import device_name, host_name, library_versions, mark_run, start_ticks
from diloco.process.watchdog import TurnWatch, Watchdog, where_it_stands
from inner.masking import mask_secrets
from rendezvous.agreement.membership import read_beat, read_control, refuse_lost
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import Emit, Parts, Worker, together_on
from rendezvous.clock import Clock, SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.store import PatientStore, Store
from rendezvous.stores.run_key import as_sealed

if TYPE_CHECKING:
    from rendezvous.weights.writer import WeightsWriter

ORPHAN_GRACE_S = 40.0  # time to leave, for an inner step and its upload; then the process ends by force
UPLOAD_S = 300.0  # time for the upload of the last offer
WEIGHTS_PATIENCE_S = 10.0
LAST_WORDS_S = 10.0  # time to write the session's end into the bucket
STEP_S = 0.5  # seconds between two checks, in a pause, whether this replica was asked to leave


class Session:
    """A claimed slot with heartbeats.   rv: its Rendezvous.

    hung_after_s: seconds without an inner step after which the session may end itself (watchdog.py), 0: never.
    keep: bytes of blobs that stay in the bucket (rendezvous/keeping/budget.py), None for all.
    generation: the generation that this process has claimed; 0: claim the next one.
    ranks: processes of its replica, 0: one.
    broadcasts: write bf16 weights of steps that this session closes (rendezvous/weights/).
    """

    def __init__(
        self,
        store: Store,
        slot: str,
        timing: Timing,
        *,
        clock: Clock | None = None,
        keep: int | None = None,
        broadcasts: bool = False,
        parent_alive: Callable[[], bool] = lambda: True,
        hung_after_s: float = 0.0,
        generation: int = 0,
        ranks: int = 0,
    ) -> None:
        self.clock = clock or SystemClock()
        self.timing = timing
        self._store = store
        self._slot = slot
        self._journal: Journal | None = None
        self._parent_alive = parent_alive
        self._alone_since = self._until = self._ends = 0.0
        self._alone_at: tuple[str, int, int] | None = None
        self._early: list[tuple[str, dict[str, Any]]] = []  # emitted before there was a journal
        if (sealed := as_sealed(store)) is not None:
            sealed.emit = self.emit
        mark_run(store.url)  # before other processes can read the claim
        self._ended = threading.Event()
        self.why = "asked to leave"
        self.on_event: Callable[[str, dict[str, Any]], None] = lambda event, fields: None  # called with every event
        self.where: Callable[[], str] = where_it_stands  # tells where an inner step hangs
        self.watchdog = Watchdog(self.clock, hung_after_s)
        self._turn = TurnWatch()
        self._flush_due = False
        self.weights = _weights_writer(store, self.clock, self.emit) if broadcasts else None
        threads = None
        if os.environ.get("OMP_NUM_THREADS") != "1":
            from rendezvous.threads import threads_here

            threads = threads_here(os.environ)
        self.rv = Rendezvous(
            store, self.clock, slot, Rules(), timing, emit=self.emit, **process_fields(), ranks=ranks, keep=keep,
            threads=threads, background=Worker(self.emit), uploads=Worker(self.emit), together=together_on(store),
            weights=self.weights,
        )  # fmt: skip
        self._parts = Parts(self.emit)
        refuse_lost(self.rv.store, read_control(self.rv.store))
        self.rv.claim(generation)
        if self.rv.generation > 1 and (before := read_beat(self.rv.store, slot)) is not None:
            self.rv.members.status.box_usd = before.box_usd
        self._journal = Journal(store, self.clock, slot, self.rv.generation)
        for event, fields in self._early:
            self.emit(event, **fields)
        self.emit(
            "claimed", generation=self.rv.generation, pid=os.getpid(), host=host_name(), device=device_name(),
            versions=library_versions(),
        )  # fmt: skip
        self._thread = threading.Thread(target=self._beat, name=f"beat-{slot}", daemon=True)
        self._thread.start()
        threading.Thread(target=self._watch_turns, name=f"watch-{slot}", daemon=True).start()

    def emit(self, event: str, **fields: Any) -> None:
        if self._journal is None:
            self._early.append((event, fields))
        else:
            self._journal.emit(event, **fields)
        self.on_event(event, fields)

    def add_sample(self, sample: dict[str, Any]) -> None:
        """Add a few rollouts of this replica's current outer step to the log."""
        if self._journal is not None:
            self._journal.add_sample(self.rv.step, sample)

    def flush(self) -> None:
        if self._journal is not None:
            self._journal.flush()

    def flush_soon(self) -> None:
        """Flush the log with the next heartbeat, in its thread, so that the caller does not wait for a request."""
        self._flush_due = True

    def ask_to_leave(self, why: str = "asked to leave") -> None:
        """Make the session offer its work at the next inner step, and leave.  Safe in a signal handler."""
        self.rv.ask_to_leave()
        self.why = why

    def end(self) -> None:
        """Stop the heartbeats.  The slot stays claimed; a successor takes the next generation."""
        self.flush()
        self._ended.set()

    def check_alive(self) -> None:
        """Raise HeartbeatLost if the thread has ended, for any reason. Called at each inner step, so it is cheap."""
        if not self._thread.is_alive() and not self._ended.is_set() and self.rv.members.heartbeat_lost is None:
            self.rv.members.heartbeat_lost = RuntimeError("its thread is gone")
        self.rv.members.check_alive()

    def _beat(self) -> None:
        self._looked_at = self.clock.now()
        try:
            while not self._ended.wait(self.timing.beat):
                with self._turn:
                    self.rv.members.tick()
                    self._parts.run(self._flush_if_due, self._look_at_inner_steps, self._look_after_lease)
        except BaseException as error:
            self._end_without_heartbeat(error)

    def _watch_turns(self) -> None:
        """End the process if a turn hangs, because heartbeats and lease checks would stop."""
        pause = max(1.0, self.timing.beat)
        while not self._ended.wait(pause):
            if self._turn.has_overstayed(pause):
                text = f"a request to the store has had no answer for {self._turn.limit_s:.0f} s (a mount that stalls?)"
                print(
                    f"{self._slot}: {text}; this session ends, its slot is started again", file=sys.stderr, flush=True
                )
                os._exit(exitcodes.HUNG)

    def _flush_if_due(self) -> None:
        if self._flush_due:
            self._flush_due = False
            self.flush()

    def _look_at_inner_steps(self) -> None:
        before, self._looked_at = self._looked_at, self.clock.now()
        if (stood := self.watchdog.look(min(self._looked_at - before, 4 * self.timing.beat))) is not None:
            self._end_hung(stood)

    def _look_after_lease(self) -> None:
        if not self._parent_alive():
            what = "the process that launched this replica is gone"
            self._leave_abandoned("its launcher is gone", what, ORPHAN_GRACE_S + self._pace_s())
        elif self._is_lease_over():
            what = "the supervisor did not extend the budget's lease"
            self._leave_abandoned("the budget's lease is over", what, ORPHAN_GRACE_S)  # no extra time: it costs money
        else:
            self._alone_since, self._alone_at = 0.0, None

    def _is_lease_over(self) -> bool:
        """Whether `until` has passed.  Ignore changes of the wall clock after the first look at this `until`."""
        until, now = self.rv.members.wanted.until, self.clock.now()
        if until != self._until:
            self._until, self._ends = until, now + until - self.clock.wall()
        return until > 0 and self._ends <= now

    def _end_without_heartbeat(self, error: BaseException) -> None:
        """Make the training thread raise HeartbeatLost at its next inner step; end the process by force if it hangs."""
        self.rv.members.heartbeat_lost = error
        try:
            print(f"{self._slot}: its heartbeat has ended: {error}; leaving", file=sys.stderr, flush=True)
            self._ended.wait(ORPHAN_GRACE_S)
        finally:
            if not self._ended.is_set():
                os._exit(exitcodes.CRASHED)

    def _end_hung(self, stood_s: float) -> None:
        """Log where the main thread hangs, and end the process, because that thread no longer reacts."""
        faulthandler.dump_traceback(sys.stderr)
        where = self.where()
        limit = self.watchdog.limit_s
        status = self.rv.members.status
        text = f"no inner step for {stood_s:.0f} s (limit {limit:.0f} s, at least fleet.hung_after_s): {where}"
        print(f"{self._slot}: {text}; this session ends, its slot is started again", file=sys.stderr, flush=True)
        self.emit("hung", step=status.step, inner=status.inner, stood_s=stood_s, limit_s=limit, where=where, text=text)
        self._say_last_words()
        os._exit(exitcodes.HUNG)

    def _say_last_words(self) -> None:
        """Write the last heartbeat and the log's end, for LAST_WORDS_S at most."""

        def send() -> None:
            self.rv.members.write_leave_beat()
            self.flush()

        last_words = threading.Thread(target=send, daemon=True)
        last_words.start()
        last_words.join(LAST_WORDS_S)

    def _pace_s(self) -> float:
        """Return the longest inner step's seconds, plus UPLOAD_S if a step has ended since the launcher's end."""
        return self.watchdog.longest_s + (UPLOAD_S if self._alone_at not in (None, self._place()) else 0.0)

    def _place(self) -> tuple[str, int, int]:
        status = self.rv.members.status
        return status.phase, status.step, status.inner

    def _leave_abandoned(self, why: str, what: str, grace_s: float) -> None:
        """Ask the session to leave. After `grace_s`, end it by force, and log what was lost."""
        now = self.clock.now()
        if not self._alone_since:
            self._alone_since, self._alone_at = now, self._place()
            print(f"{self._slot}: {what}; leaving", file=sys.stderr, flush=True)
            self.ask_to_leave(why)
        elif now - self._alone_since > grace_s:
            phase, step, inner = self._place()
            lost = f"{inner} inner steps and the one that it was in are lost" if phase == "train" else "nothing is lost"
            text = f"it did not leave within {grace_s:.0f} s, so it is ended in outer step {step}: {lost}"
            print(f"{self._slot}: {text}", file=sys.stderr, flush=True)
            self.emit("warning", kind="cut_off", text=text)
            self._say_last_words()
            os._exit(exitcodes.LEFT)


def _weights_writer(store: Store, clock: Clock, emit: Emit) -> "WeightsWriter":
    """Make the writer of weights.  Its store retries only briefly, because the next step has newer weights."""
    from rendezvous.weights.writer import WeightsWriter

    patient = PatientStore(store, clock, WEIGHTS_PATIENCE_S)
    return WeightsWriter(patient, clock, reading=Worker(emit), uploads=Worker(emit), emit=emit)


def process_fields() -> dict[str, Any]:
    """Return the fields of a claim that identify this process."""
    return {"host": host_name(), "pid": os.getpid(), "started": start_ticks(os.getpid()) or 0}


class SessionHost:
    """The inner.host.Host of a session: messages about the user's code go to the heartbeat and to the log.

    run: its nonce.   box_usd_per_hour: replaces the provider's price.   Each note resets the watchdog, because a
    reward that is retried has time limits of its own.
    Not promised: that a note is seen. The next phase of the replica overwrites it.
    """

    def __init__(self, session: Session, run: str = "", box_usd_per_hour: float | None = None) -> None:
        self._session = session
        self._box_usd_per_hour = box_usd_per_hour
        self.owner = (run, session.rv.slot, session.rv.generation)

    def note(self, text: str) -> None:
        self._session.rv.members.status.note = mask_secrets(text)
        self._session.watchdog.resume()

    def emit(self, event: str, text: str, **fields: Any) -> None:
        self._session.emit(event, step=self._session.rv.step, text=text, **fields)
        self._session.flush_soon()

    def rented(self, seconds: float, usd_per_hour: float | None) -> None:
        price = usd_per_hour if self._box_usd_per_hour is None else self._box_usd_per_hour
        self._session.rv.members.status.box_usd += (price or 0.0) * seconds / 3600

    def pause(self, seconds: float) -> None:
        clock = self._session.clock
        until = clock.now() + seconds
        while (left := until - clock.now()) > 0 and not self._session.rv.is_leaving:
            clock.sleep(min(STEP_S, left))
