"""Explain one outer step as text: a pure function from the bucket's facts (diloco/audit/step_facts.py) to lines.

    offers    r02-1 at 10:24:41.047: 4 inner steps, 16 samples, 0.26 s after its last outer step; counted, weight 1
    closing   … 0.9 s after the last offer that counts; of 3 replicas that were expected r01 was missing: …
    late      r01-1's work for step 6, weight 0.5
    effect    ‖ḡ‖, each cosine to it, ‖θ′ − θ‖, momentum
    lost      …
    not known …

Not promised: why a replica was slow, or whether a missing replica was alive: its heartbeats are overwritten.
"""

from collections.abc import Iterator
from datetime import UTC, datetime
from statistics import median
from typing import Any

from diloco.audit.step_facts import COUNTED, FENCED, FOREIGN, LATE, LOST, NONE, OPEN, SPARE, OfferFacts, StepFacts
from diloco.events import LAUNCH_ENDS, SESSION_ENDS
from diloco.runlog.sessions import observed_words, own_words
from diloco.units import duration
from rendezvous.agreement.rules import patience_s
from rendezvous.records.records import Claim, Commit, Listed

CLOCKS = "how the machines' clocks differ: each time is by its writer's clock"
BEATS = "which replicas looked alive when the step was closed: each heartbeat overwrites the previous heartbeat"
YEAR_9999 = 253402300799.0  # a record may have any number as its time; Python has no later dates
OPPOSED = -0.1  # a smaller cosine to the mean is reported


def explain(facts: StepFacts) -> list[str]:
    """Return the step as lines of text."""
    return [
        *_decision(facts),
        *(f"  {line}" for line in _offer_lines(facts)),
        *(f"missing: {slot}: {_why_missing(facts, slot)}" for slot in missing_slots(facts)),
        *_late_lines(facts),
        *_fence_lines(facts),
        *_effect_lines(facts),
        *_lost_lines(facts),
        *_event_lines(facts),
        *(f"not known: {what}" for what in _unknown(facts)),
    ]


def explain_dict(facts: StepFacts) -> dict[str, Any]:
    """Return the step's facts as plain data for JSON."""
    effect = facts.effect
    offers = [
        {
            "slot": one.offer.slot, "generation": one.offer.generation, "at": one.offer.at, "took": one.offer.took,
            "h": one.offer.h, "samples": one.offer.samples, "stats": one.offer.stats, "fate": one.fate,
            "listed_in": one.listed_in, "weight": one.listed.weight if one.listed else None,
            "factor": one.listed.factor if one.listed else None,
        }
        for one in facts.offers
    ]  # fmt: skip
    parts = [{"step": t, "slot": s, "norm": n, "cosine": c} for (t, s), (n, c) in effect.parts.items()]
    return {
        "step": facts.commit.t, "at": facts.commit.at, "by": facts.commit.by, "min_replicas": facts.commit.m,
        "mode": facts.commit.mode, "offers": offers, "missing": missing_slots(facts),
        "late": [{"step": o.step, "slot": o.slot, "weight": o.weight} for o in facts.commit.late_offers],
        "effect": {**{k: v for k, v in vars(effect).items() if k not in ("parts", "gone")}, "parts": parts},
        "unknown": _unknown(facts), "lines": explain(facts),
    }  # fmt: skip


# ---------------------------------------------------------------------- the decision


def expected_slots(facts: StepFacts) -> list[str]:
    """Return the slots that the step waits for: in either of the two last commits, not leaving; at step 0 all."""
    commit = facts.commit
    newest = {o.slot: o for c in reversed(facts.before) for o in sorted(c.offers, key=lambda o: o.step)}
    if commit.t == 0:
        return facts.wanted.slot_names[: facts.wanted.replicas]
    return sorted(slot for slot, o in newest.items() if not o.leaving)


def missing_slots(facts: StepFacts) -> list[str]:
    """Return the expected slots without a fresh offer."""
    fresh = {o.slot for o in facts.commit.fresh_offers}
    return [slot for slot in expected_slots(facts) if slot not in fresh]


def _decision(facts: StepFacts) -> Iterator[str]:
    commit = facts.commit
    fresh = [one for one in facts.offers if one.fate == COUNTED]
    yield (
        f"step {commit.t} was closed by {commit.by} at {_time(commit.at, date=True)}: {len(commit.fresh_offers)} fresh "
        f"and {len(commit.late_offers)} late pseudogradients, min_replicas {commit.m}, reduced "
        f"{'in shards by ' + ', '.join(commit.owners) if commit.owners else 'by every replica for itself'}"
    )
    if fresh:
        yield f"why then: {_why_then(facts, sorted(one.offer.at for one in fresh))}"


def _why_then(facts: StepFacts, ats: list[float]) -> str:
    commit = facts.commit
    missing = missing_slots(facts)
    since_last = f"{duration(commit.at - ats[-1])} after the last offer that counts"
    if not missing:
        expected = len(expected_slots(facts))
        there = f"all {expected} expected replicas had offered" if expected else "the step expected no other offers"
        return f"{there}; {since_last}"
    quorum = ats[min(commit.m, len(ats)) - 1]
    tooks = [one.offer.took for one in facts.offers if one.fate == COUNTED]
    grace = patience_s(tooks, facts.timing.poll)
    more = f"up to {duration(4.5 * median(tooks) + grace)} for a replica whose rate promises an offer"
    return (
        f"the step needs {commit.m} offers, had them at {_time(quorum)}, and was closed "
        f"{duration(commit.at - quorum)} later ({since_last}). A step waits {more}, but not for a replica that is "
        f"dead, or that made no progress for {duration(grace)}"
    )


def _offer_lines(facts: StepFacts) -> Iterator[str]:
    if not facts.offers:
        yield "no offer for this step can be read"
    for one in sorted(facts.offers, key=lambda one: one.offer.at):
        o = one.offer
        inside = f"{o.h} inner steps" + (f", {o.samples:g} samples" if o.samples else "")
        said = ", ".join(f"{name} {o.stats[name]:.4g}" for name in ("reward", "loss", "tokens") if name in o.stats)
        yield (
            f"{o.slot}-{o.generation} at {_time(o.at)}: {inside}, {duration(o.took)} since its last outer step"
            f"{', ' + said if said else ''}{', and leaves' if o.leaving else ''}; {_fate(facts, one)}"
        )


def _fate(facts: StepFacts, one: OfferFacts) -> str:
    t = facts.commit.t
    if one.listed is not None and one.fate in (COUNTED, LATE):
        late = f" late, in step {one.listed_in}," if one.fate == LATE else ""
        return f"counted{late} with weight {one.listed.weight:.4g}{_gate(one.listed)}{' (all zeros)' * one.offer.zero}"
    return {
        OPEN: "not counted yet; one of the next commits may list it",
        LOST: f"lost: no commit up to step {t + facts.rules.fragments * facts.rules.max_carry} listed it",
        FENCED: "does not count: a later generation of its slot had fenced it",
        FOREIGN: f"does not count: it began from θ {one.offer.base}, the run's step from {facts.commit.base}",
        SPARE: "does not count: another attempt of its slot does",
        NONE: f"does not count: {one.why}",
    }[one.fate]


def _gate(listed: Listed) -> str:
    if listed.factor == 1.0:
        return ""
    return f", of which the norm gate left {listed.factor:.3g}: it is {listed.norm:.3g} long"


# ---------------------------------------------------------------------- missing, late and fenced replicas


def _why_missing(facts: StepFacts, slot: str) -> str:
    commit = facts.commit
    claim = _holder(facts.claims.get(slot, ()), commit)
    leave = facts.leaves.get(f"{slot}-{claim.generation}") if claim else None
    if leave is not None and leave.at <= commit.at:
        return f"generation {leave.generation} had left at {_time(leave.at)} ({leave.reason})"
    ends = [event for event in facts.events if event["slot"] == slot and _is_end(event)]
    ended = f"; {ends[-1]['by']} logged at {_time(ends[-1]['at'])}: {_event_words(ends[-1])}" if ends else ""
    own = [one for one in facts.offers if one.offer.slot == slot and one.fate in (LATE, LOST, OPEN)]
    if own:
        after = own[0].offer.at - commit.at
        when = f"{duration(after)} after the close" if after >= 0 else f"{duration(-after)} before it, by its clock"
        return f"its offer came {when}: the step no longer waited, or the replica looked dead{ended}"
    begun = max((o.generation for c in facts.before for o in c.offers if o.slot == slot), default=0)
    if claim is not None and claim.generation > begun > 0:
        return f"generation {claim.generation} had claimed the slot at {_time(claim.at)} and had no offer yet{ended}"
    return f"it has no offer for this step: it looked dead, or showed no progress{ended}"


def _holder(claims: tuple[Claim, ...], commit: Commit) -> Claim | None:
    """Return the newest claim at the time of the commit."""
    return max((c for c in claims if c.at <= commit.at), key=lambda c: c.generation, default=None)


def _is_end(event: dict[str, Any]) -> bool:
    return event["event"] in (*LAUNCH_ENDS, *SESSION_ENDS)


def _late_lines(facts: StepFacts) -> Iterator[str]:
    for o in facts.commit.late_offers:
        age = (facts.commit.t - o.step) // facts.rules.fragments
        yield (
            f"credited late: {o.slot}-{o.generation}'s {o.h} inner steps for step {o.step}, with weight {o.weight:.4g} "
            f"(discounted {age} times by {facts.rules.age_discount:g}{_gate(o)})"
        )


def _fence_lines(facts: StepFacts) -> Iterator[str]:
    before = facts.before[0].fence if facts.before else {}
    for slot, generation in sorted(facts.commit.fence.items()):
        if facts.before and generation > max(1, before.get(slot, 0)):
            yield f"fenced: the holder of {slot} before generation {generation}; its offers count no more from here on"


# ---------------------------------------------------------------------- the effect of the mean


def _effect_lines(facts: StepFacts) -> Iterator[str]:
    effect = facts.effect
    if effect.mean_norm is None:
        return
    source = "as it was announced" if effect.source == "announced" else "computed from the deltas"
    like = "" if effect.rho is None else f", cosine {effect.rho:+.2f} to the mean before it"
    yield f"mean ({source}): ‖ḡ‖ = {effect.mean_norm:.4g}{like}"
    for (step, slot), (length, cos) in effect.parts.items():
        of = slot if step == facts.commit.t else f"{slot}'s of step {step}"
        against = " (against the mean)" if cos is not None and cos < OPPOSED else ""
        yield f"  {of}: ‖Δ‖ = {length:.4g}" + ("" if cos is None else f", cosine {cos:+.2f} to the mean{against}")
    if effect.step_norm is None or effect.momentum is None or effect.theta_norm is None:
        return
    share = f", {100 * effect.step_norm / effect.theta_norm:.3g} % of its length" if effect.theta_norm else ""
    of = f" fragment {facts.commit.t % facts.rules.fragments} of" if facts.rules.fragments > 1 else ""
    if effect.mean_norm == 0.0:
        yield f"the mean was zero:{of} θ and the outer momentum stayed as they were"
        return
    yield f"the outer step moved{of} θ by {effect.step_norm:.4g}{share}, at outer lr {effect.lr:.4g}"
    yield f"outer momentum: {effect.momentum[0]:.4g} before, {effect.momentum[1]:.4g} after"


# ---------------------------------------------------------------------- lost, noted, unknown


def _lost_lines(facts: StepFacts) -> Iterator[str]:
    lost = [one for one in facts.offers if one.fate in (LOST, FENCED, FOREIGN, NONE)]
    steps = sum(one.offer.h for one in lost)
    samples = sum(one.offer.samples for one in lost)
    names = ", ".join(f"{one.offer.slot}-{one.offer.generation}" for one in lost)
    yield f"lost: {steps} inner steps, {samples:g} samples ({names})" if lost else "lost: no work that was offered"


def _event_lines(facts: StepFacts) -> Iterator[str]:
    for event in facts.events:
        about = f" about {event['slot']}" if event["slot"] not in event["by"] else ""
        yield f"logged by {event['by']}{about} at {_time(event['at'])}: {_event_words(event)}"


def _event_words(event: dict[str, Any]) -> str:
    words = own_words(event) or event.get("trouble") or observed_words(event)
    return f"{event['event']}{': ' if words else ''}{words}"


def _unknown(facts: StepFacts) -> list[str]:
    return [BEATS, CLOCKS, *facts.effect.gone]


def _time(at: float, date: bool = False) -> str:
    when = datetime.fromtimestamp(min(max(at, 0.0), YEAR_9999), UTC)
    return f"{when:%Y-%m-%d %H:%M:%S}.{when.microsecond // 1000:03d}{' UTC' if date else ''}"[0 if date else 11 :]
