"""Starts the slots that a plan asks for: makes specs, checks the budget, and launches all in one request.

    slots that are due ─▶ specs ─▶ budget allows it? ─▶ log: launching ─▶ launch_replicas ─▶ log: launched
                            │        └─ no ─▶ log: refused, and running replicas continue
                            └─ before θ₀ is published, a rented GPU would only wait for it: start it later

Not promised: that retries ever end if a platform refuses a launch in a run that has had launches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco.runlog.reader import Report
from executors.platforms import FAR
from executors.platforms.base import LAUNCH, ExecutorError, Refused, ReplicaSpec, Unavailable
from executors.platforms.machine.gpu import asked_for
from executors.platforms.places import Place, place_of
from executors.supervision.lease import Lease
from executors.supervision.slots.slot_state import SlotState
from executors.supervision.slots.slots import PUBLISH, Slots
from rendezvous import layout

if TYPE_CHECKING:
    from executors.supervision.money.limit import SpendLimit

ACTOR = "diloco.actor:main"
PUBLISHER = "executors.supervision.supervisor:publish_model"
Start = tuple[SlotState, str]  # the slot, and the reason


@dataclass(eq=False)
class Starts:
    """The launches of one supervisor.

    limit_for: returns the spending limit that a report asks for, or None.
    parent: "PID:START" of a process; replicas of this machine end when it ends.   entrypoint: each replica's function.
    """

    slots: Slots
    places: Sequence[Place]
    limit_for: "Callable[[Report], SpendLimit | None]"
    lease: Lease
    parent: str
    entrypoint: str
    _short_of: str = ""  # why the budget refused a launch

    def put_off_rented(self, starts: Sequence[Start]) -> list[Start]:
        """Return the starts without actors and rented GPUs, which would wait for the model; announce those now."""
        early = [state for state, _ in starts if self._bills_a_gpu(state) or layout.is_actor(state.slot)]
        if early:
            self.slots.executor.expect([self._spec_for(state) for state in early])
        return [start for start in starts if start[0] not in early]

    def _bills_a_gpu(self, state: SlotState) -> bool:
        place = place_of(self.places, state.slot)
        return place.executor in FAR and asked_for(place.gpu) > 0

    def try_to_start(self, starts: Sequence[Start], report: Report) -> str:
        """Launch the starts.   Return "", or the reason why the run must end.

        If a platform refuses or does not answer, and the run has had launches, try again later.
        """
        try:
            actors = [start for start in starts if layout.is_actor(start[0].slot)]
            others = [start for start in starts if start not in actors]
            why = self._launch_all(others, report) if others else ""
            if actors and not why:  # a budget too small for actors does not end the run
                self._launch_all(actors, report)
            self.slots.outages.answered(LAUNCH)
            return why
        except ExecutorError as error:
            begun = isinstance(error, Refused | Unavailable) and bool(report.of_kind("launched"))
            if not begun and not self.slots.anybody:
                raise
            self.slots.outages.failed(LAUNCH, [state.slot for state, _ in starts], error)
            return ""

    def _launch_all(self, starts: Sequence[Start], report: Report) -> str:
        """Launch all of these starts in one call, or start none of them if the budget does not allow all."""
        slots = self.slots
        specs = [self._spec_for(state) for state, _ in starts]
        if (limit := self.limit_for(report)) is not None:
            verdict = self.lease.keep_while(lambda: limit.launch_verdict(report, specs))
            if why := limit.carry_out(verdict, report):
                return self._do_without(why)
        slots.emit("launching", launches=[f"{s.slot}.{s.attempt}" for s in specs])  # the next supervisor looks for them
        handles = self.lease.keep_while(lambda: slots.executor.launch_replicas(specs))
        for (state, why), handle in zip(starts, handles, strict=True):
            state.launched(handle, slots.clock.now())
            slots.book("launched", handle, why)
        return ""

    def _do_without(self, why: str) -> str:
        """Log that the budget refuses a launch; return the reason to end the run if no replica runs, else ""."""
        if self._short_of != why[:60]:
            self._short_of = why[:60]
            self.slots.emit("refused", text=why)
        return "" if any(t.running for t in self.slots.all() if not layout.is_actor(t.slot)) else why

    def _spec_for(self, state: SlotState) -> ReplicaSpec:
        slot = state.slot
        place = place_of(self.places, slot)
        url = self.slots.run.store.url
        attempt = 1 + max(state.attempt, state.beat[0] if state.beat else 0)
        fresh = (script := self.slots.run.config.script) is not None and script.fresh
        settings = {"timeout_s": place.timeout_s, "secrets": place.secrets, "env": place.env, "fresh": fresh}
        if slot == PUBLISH:
            return ReplicaSpec(url, slot, attempt, PUBLISHER, (url,), **settings)
        parent = ("--parent", self.parent) if self.parent and place.executor == "local" else ()
        several = ("--devices", str(place.devices)) if place.devices > 1 and not layout.is_actor(slot) else ()
        argv = (url, "--slot", slot, *parent, *several)
        entrypoint = ACTOR if layout.is_actor(slot) else self.entrypoint
        return ReplicaSpec(url, slot, attempt, entrypoint, argv, gpu=place.gpu, **settings)
