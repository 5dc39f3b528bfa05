"""Read all facts about one outer step from the bucket, without write access.

    commits t−2 … t, and those after t that may list its late work ─┐
    offers for step t, claims, leave records, desired state         ├─▶ StepFacts ──▶ diloco/audit/explain.py ──▶ text
    events that sessions and supervisor logged meanwhile            │
    deltas, mean, θ_t and its momentum, as far as they are kept    ─┘

Not promised: heartbeats, because each one overwrites the previous one, so none shows which replicas looked alive;
a common clock, because `at` is the time of the writer's machine.
"""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diloco.events import LAUNCH_ENDS, SESSION_ENDS, WARNINGS
from diloco.model.contributions import read_contributions, read_mean
from diloco.model.export import model_record, state_at
from diloco.outer.optimizer import OuterState
from diloco.outer.safety import cosine, dot, norm
from diloco.process.journal import read_log
from diloco.run.config import ConfigError
from diloco.run.record import Run, timing_for
from diloco.runlog.reached import refuse_lost
from rendezvous import layout
from rendezvous.agreement.chain import Chain
from rendezvous.agreement.membership import Wanted, claims_above, controls_above, read_leave
from rendezvous.agreement.rules import Rules, Timing, is_eligible, offer_flaw
from rendezvous.background import no_emit, together_on
from rendezvous.clock import SystemClock
from rendezvous.errors import RendezvousError
from rendezvous.keeping.reach import newest_head
from rendezvous.means.reduce import Reducer
from rendezvous.records.records import Claim, Commit, Leave, Listed, Offer, WireError
from rendezvous.store import VOID, PatientStore, Store

COUNTED, LATE, OPEN, LOST, FENCED, FOREIGN, SPARE, NONE = (
    "counted", "counted late", "may still be counted", "lost", "fenced", "from another θ", "a spare", "no offer",
)  # fmt: skip
ABOUT_A_STEP = WARNINGS | {"caught_up"}
NOTED = ABOUT_A_STEP | {*LAUNCH_ENDS, *SESSION_ENDS}


@dataclass(frozen=True)
class OfferFacts:
    """An offer for the step, and its fate.   listed: its entry in the commit of step `listed_in`.   why: for NONE."""

    offer: Offer
    fate: str
    listed: Listed | None = None
    listed_in: int | None = None
    why: str = ""


@dataclass(frozen=True)
class Effect:
    """The mean's effect on its fragment of θ.   Numbers are None if their blobs are gone.

    parts: (step, slot) of each readable listed offer -> its length, and its cosine to the mean.
    rho: cosine to the mean of the fragment's previous step.   momentum: length before and after.
    gone: one text for each object that could not be read.
    """

    source: str = ""
    mean_norm: float | None = None
    rho: float | None = None
    parts: dict[tuple[int, str], tuple[float, float | None]] = field(
        default_factory=dict[tuple[int, str], tuple[float, float | None]]
    )
    theta_norm: float | None = None
    step_norm: float | None = None
    momentum: tuple[float, float] | None = None
    lr: float | None = None
    gone: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepFacts:
    """Facts of one outer step t.   head: the first open step.   before: commits t−1 and t−2.   wanted: the desired
    state at the commit.

    claims: slot -> claims by generation.   events: during the step, with "slot" and "generation" of their sessions.
    """

    head: int
    commit: Commit
    before: tuple[Commit, ...]
    offers: tuple[OfferFacts, ...]
    wanted: Wanted
    claims: dict[str, tuple[Claim, ...]]
    leaves: dict[str, Leave]
    rules: Rules
    timing: Timing
    events: tuple[dict[str, Any], ...] = ()
    effect: Effect = field(default_factory=Effect)


def read_step(run: Run, step: int) -> StepFacts:
    """Read the facts of the outer step from θ_step to θ_step+1.   Raises ConfigError if it was not taken."""
    store = PatientStore(run.store, SystemClock(), 10.0)
    rules = run.config.outer.rules
    head = newest_head(store)
    if not 0 <= step < head:
        refuse_lost(store, head)
        raise ConfigError(_not_there(step, head))
    chain = Chain(store, rules.window + rules.fragments * rules.max_carry + 2)
    first = max(0, step - max(2, rules.fragments))
    last = min(head - 1, step + rules.fragments * rules.max_carry)
    chain.read_before(last + 1)
    known = {t: commit for t in range(first, last + 1) if (commit := chain.read(t)) is not None}
    commit = known[step]
    before = tuple(known[t] for t in (step - 1, step - 2) if t in known)
    wanted = _wanted_at(store, commit.at)
    slots = sorted({*wanted.slot_names, *(o.slot for o in commit.offers), *commit.fence})
    claims = {slot: tuple(claims_above(store, slot)) for slot in slots}
    names = [(slot, claim.generation) for slot in slots for claim in claims[slot]]
    leaves = {f"{s}-{g}": leave for s, g in names if (leave := read_leave(store, s, g)) is not None}
    return StepFacts(
        head, commit, before, tuple(_read_offers(store, step, known, rules, head)), wanted,
        claims=claims, leaves=leaves, rules=rules, timing=timing_for(run.store, run.config.fleet),
        events=_events_of(store, names, before[0].at if before else 0.0, commit),
        effect=_read_effect(run, store, commit, known.get(step - rules.fragments)),
    )  # fmt: skip


def _not_there(step: int, head: int) -> str:
    if not head:
        return f"step {step} has not been taken: this run has not taken an outer step yet"
    return f"step {step} has not been taken: outer steps 0 to {head - 1} have. Use --step with one of those"


def _wanted_at(store: Store, at: float) -> Wanted:
    """Return the desired state at time `at`; before the first record, the first record's state."""
    wanted = Wanted()
    for control in controls_above(store, -1):
        if control.n == 0 or control.at <= at:
            wanted = wanted.with_control(control)
    return wanted


# ---------------------------------------------------------------------- offers


def _read_offers(store: Store, step: int, known: dict[int, Commit], rules: Rules, head: int) -> Iterable[OfferFacts]:
    """Yield the facts of every offer record of the step that can be decoded.  The bodies are not read."""
    for key in sorted(store.list(layout.offers_prefix(step))):
        body = store.get(key)
        if body is None:
            continue
        slot = layout.offer_slot(key)
        try:
            offer = Offer.decode(b"" if body == VOID else body)
        except WireError:
            continue
        yield _fate_of(offer, offer_flaw(offer, step, slot, rules), known, rules, head)


def _fate_of(offer: Offer, flaw: str, known: dict[int, Commit], rules: Rules, head: int) -> OfferFacts:
    if flaw:
        return OfferFacts(offer, NONE, why=flaw)
    for t, commit in sorted(known.items()):
        for listed in commit.offers:
            if (listed.step, listed.slot) == (offer.step, offer.slot) and t >= offer.step:
                if listed.nonce != offer.nonce:
                    return OfferFacts(offer, SPARE)
                return OfferFacts(offer, LATE if t > offer.step else COUNTED, listed, t)
    commit = known[offer.step]
    fence = known[offer.step - 1].fence if offer.step else {}
    if not is_eligible(offer, commit.base, fence):
        return OfferFacts(offer, FOREIGN if offer.base != commit.base else FENCED)
    return OfferFacts(offer, OPEN if head <= offer.step + rules.fragments * rules.max_carry else LOST)


# ---------------------------------------------------------------------- logs


def _events_of(
    store: Store, sessions: Iterable[tuple[str, int]], since: float, commit: Commit
) -> tuple[dict[str, Any], ...]:
    """Return the NOTED events of sessions and supervisors between two commits; warnings only if about this step."""
    supervisors = {owner for key in store.list(f"{layout.LOGS}supervisor-") if (owner := layout.log_owner(key))}
    found: list[dict[str, Any]] = []
    for slot, generation in [*sessions, *sorted(supervisors)]:
        for event in _log_between(store, layout.logs_prefix(slot, generation), since, commit.at):
            about = event.get("step", commit.t)
            within = about == commit.t if event["event"] in ABOUT_A_STEP else since <= event["at"] <= commit.at
            if event["event"] in NOTED and within:
                found.append({"slot": slot, **event, "by": f"{slot}-{generation}"})
    return tuple(sorted(found, key=lambda event: event["at"]))


def _log_between(store: Store, prefix: str, since: float, until: float) -> Iterable[dict[str, Any]]:
    """Yield the events of the log objects that may have events from `since` to `until`; objects are in time order."""
    keys = sorted(key for key in store.list(prefix) if layout.log_owner(key) and not layout.is_rollouts(key))
    begins: dict[str, float] = {}

    def begin(key: str) -> float:
        if key not in begins:
            begins[key] = min((event["at"] for event in read_log(store, key).events), default=since)
        return begins[key]

    first = max(0, bisect_right(keys, since, key=begin) - 1)
    for key in keys[first:]:
        if begin(key) > until + _SOON:
            return
        yield from read_log(store, key).events


_SOON = 60.0  # seconds within which a session logs its warnings about a commit


# ---------------------------------------------------------------------- the effect of the mean


def _read_effect(run: Run, store: Store, commit: Commit, previous: Commit | None) -> Effect:
    try:
        record = model_record(run)
        reducer = Reducer(store, SystemClock(), no_emit, run.config.outer.rules, together=together_on(run.store))
        sizes = record.fragment_sizes(run.config.outer.fragments)
    except (ConfigError, RendezvousError) as error:
        return Effect(gone=(str(error),))
    mean = np.empty(sizes[commit.t % len(sizes)], np.float32)
    gone: list[str] = []
    try:
        source = read_mean(reducer, commit, mean)
    except RendezvousError as error:
        return Effect(gone=(f"the mean: {error}",))
    mean_norm = norm(mean)
    parts = _parts(reducer, commit, mean, gone)
    rho = _rho(reducer, previous, mean, gone)
    try:
        _, state = state_at(run, record, commit.t)
        moved = _apply(state, commit.t % len(sizes), mean)
    except (ConfigError, RendezvousError) as error:
        moved = {}
        gone.append(f"θ of step {commit.t}: {error}")
    return Effect(source, mean_norm, rho, parts, **moved, gone=tuple(gone))


def _parts(
    reducer: Reducer, commit: Commit, mean: np.ndarray, gone: list[str]
) -> dict[tuple[int, str], tuple[float, float | None]]:
    found: dict[tuple[int, str], tuple[float, float | None]] = {}
    mean_norm = norm(mean)
    for one in read_contributions(reducer, commit, mean.size):
        if one.vector is None:
            gone.append(f"{one.listed.slot}'s delta for step {one.listed.step}: {one.flaw}")
        else:
            length = norm(one.vector)
            found[one.listed.step, one.listed.slot] = length, cosine(dot(one.vector, mean), length, mean_norm)
    return found


def _rho(reducer: Reducer, previous: Commit | None, mean: np.ndarray, gone: list[str]) -> float | None:
    if previous is None:
        return None
    before = np.empty_like(mean)
    try:
        read_mean(reducer, previous, before)
    except RendezvousError:
        gone.append(f"the mean of step {previous.t}, for a comparison with this step's mean")
        return None
    return cosine(dot(before, mean), norm(before), norm(mean))


def _apply(state: OuterState, fragment: int, mean: np.ndarray) -> dict[str, Any]:
    optimizer = state.optimizers[fragment]
    theta = state.thetas[fragment].numpy().copy()
    momentum = norm(optimizer.momentum.numpy())
    state.apply(fragment, mean)
    return {
        "theta_norm": norm(theta),
        "step_norm": norm(state.thetas[fragment].numpy() - theta),
        "momentum": (momentum, norm(optimizer.momentum.numpy())),
        "lr": optimizer.param_groups[0]["lr"],
    }
