"""Changes a running fleet: the number of replicas, and slots to drain.

    scale RUN 5     control: replicas = 5     the supervisor starts r03, r04; or drains replicas beyond five
    drain RUN r02   control: drain r02        r02 ends its inner step, offers its work, and leaves

Not promised: an immediate effect; the supervisor reads the control records every few seconds.
"""

import shlex
from contextlib import suppress
from dataclasses import replace

from diloco.run.combinations import refuse_actors
from diloco.run.founding import is_finished
from diloco.run.record import Run
from executors.cli.opening import finished_words
from executors.platforms.places import places_of
from executors.preflight.quote import Quote, make_offer, slots_of
from executors.preflight.run_url import UsageError
from executors.supervision.costs import Costs
from executors.supervision.holder import supervisor_of
from executors.supervision.money.budget import Budget
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, read_control, refuse_lost, write_control
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError
from rendezvous.store import Store


def growth_quote(run: Run, replicas: int, quorum: int | None, actors: int | None, spent: Costs) -> Quote | None:
    """Return the price of additional replicas and actors; None if none are added."""
    wanted = read_control(run.store)
    if is_finished(run.store, wanted):
        return None
    _check_size(replicas, quorum or wanted.min_replicas, actors or 0)
    if actors:
        refuse_actors(run.config)
    more = [*slots_of(replicas)[wanted.replicas :], *map(layout.actor_name, range(wanted.actors, actors or 0))]
    if not more:
        return None
    found = make_offer(run.url, places_of(wanted.places), more, Budget.of(wanted), spent)
    return replace(found, running=spent.rate_soon)


def scale(run: Run, clock: Clock, replicas: int, quorum: int | None, actors: int | None = None) -> list[str]:
    """Set new numbers of replicas and actors; return lines for the user.   None leaves a number unchanged."""
    before = read_control(run.store)
    if over := finished_words(run.store, run.url):
        return [over]
    news = {"replicas": replicas, **({"min_replicas": quorum} if quorum else {})}
    write_control(run.store, clock, **news, **({} if actors is None else {"actors": actors}))
    words = "" if actors is None else f", {before.actors} -> {actors} actors"
    return [f"{before.replicas} -> {replicas} replicas{words}", *_unheard_slots(run, before)]


def drain(run: Run, clock: Clock, slot: str) -> list[str]:
    """Ask one slot to offer its work and leave; return lines for the user."""
    before = read_control(run.store)
    refuse_lost(run.store, before)  # without its records, the run would seem to have no slot
    check_slot(before, slot)
    if over := finished_words(run.store, run.url):
        return [over]
    if before.stop:
        starts = f"`diloco resume {shlex.quote(run.url)}` starts every slot again"
        return [f"this run was asked to stop, so {slot} leaves as all others do; nothing was changed. {starts}"]
    after = write_control(run.store, clock, drain=slot)
    left = [s for s in before.slot_names if after.is_kept(s)]
    lines = [f"{slot} ends its inner step, offers its work and leaves; `diloco scale` or `resume` brings it back"]
    if layout.is_slot(slot) and len(left) < after.min_replicas:
        lines.append(
            f"warning: every outer step needs min_replicas = {after.min_replicas} replicas, and {len(left)} will be "
            f"left: no outer step is then taken until there are more (diloco scale {shlex.quote(run.url)} N)"
        )
    return lines  # without a supervisor, too: the replica itself reads the control record


def check_slot(wanted: Wanted, slot: str) -> None:
    there = [*slots_of(wanted.replicas), *filter(layout.is_actor, wanted.member_names)]
    if slot not in there:
        raise UsageError(f"there is no slot {slot!r} in this run; there are {', '.join(there)}")


def _check_size(replicas: int, quorum: int, actors: int) -> None:
    if (many := max(replicas, actors)) > layout.MOST_SLOTS:
        raise UsageError(f"{many} slots are more than a run can have. Ask for at most {layout.MOST_SLOTS}")
    if replicas < quorum:
        raise UsageError(
            f"every outer step needs {quorum} replicas, so a run with {replicas} could take no step. "
            f"Scale to {quorum} at least, or add --min-replicas {replicas}"
        )


def after_stop_words(store: Store, *, found: bool) -> str:
    """Return the last line of `diloco stop` after all replicas have ended.   found: whether a replica ever ran."""
    if not found:
        return "no replica ever ran here"
    with suppress(RendezvousError):  # a run with damaged control records can be stopped, too
        if is_finished(store, read_control(store)):
            return "no replica runs any more, and all outer steps are committed"
    return "no replica runs any more; `diloco resume` continues the run"


def _unheard_slots(run: Run, before: Wanted) -> list[str]:
    if not before.stop and supervisor_of(run.store) is not None:
        return []
    return [f"this run has no supervisor now; `diloco resume {shlex.quote(run.url)}` carries the change out"]
