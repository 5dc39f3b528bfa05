"""Checks what replicas train on against the bucket, with its own reader of bundles.

only what stands is trained        in this run, slot and place, whole, with log-probs if an actor's
nothing is too old                 0 ≤ outer step − record's step ≤ S; 0 of a session's own
a place is trained once            by a life; and by all lives of its slot on the same bytes, but for unlucky ones
an unlucky life trains its own     after two lives of its slot without a counted offer, which bundles may have ended
no lie is trained                  where the door checks every bundle
an offer has its inner steps       and a replacement begins where the offers that count end
no replica waits for an actor      a generation takes no longer than the sampling
one GET and one PUT                where nothing fails; and there few of actors' bundles are too old or too late

A place whose record the store did not take is excused: the replica told of it.

Not promised: what is written about a bundle in logs.
"""

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from xxhash import xxh3_128_hexdigest as xxh3

from tests.sim.replica import Process

if TYPE_CHECKING:
    from inner.rollouts.recording.bundle import Bundle
    from inner.rollouts.recording.recorded import BundlePlace
    from rendezvous.records.records import Commit
    from tests.sim.simulate import World

SLACK_S = 1.0  # for a few requests of 0.04 s
WASTE = 0.25  # most of the actors' bundles that come too late where nothing fails


@dataclass(frozen=True)
class Sample:
    """by: the slot or the actor.   weights: the outer step of those that it was really sampled with."""

    slot: str
    generation: int
    by: str
    weights: int


def parsed(body: bytes) -> tuple[dict[str, Any], str] | None:
    """Return a bundle's record and its sample's number; None: it is torn, or no bundle."""
    payload, _, record = body.removesuffix(b"\n").rpartition(b"\n")
    try:
        told = json.loads(record)
        if told["digest"] != f"xxh3-128:{xxh3(payload)}":
            return None
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        told["has logprobs"] = "logprobs" in header
        return told, json.loads(header["__metadata__"]["bundle"])["completions"][0]
    except (ValueError, KeyError, TypeError):
        return None


class Ledger:
    """All samples, and what was trained.   steps: (slot, generation of the session, outer step) -> inner steps."""

    def __init__(self, world: "World") -> None:
        self.w, self.plan = world, world.acting
        self.samples: list[Sample] = []
        self.lies: set[int] = set()  # samples of which a broken actor told another step
        self.delivered = Counter[bool]()
        self.steps = Counter[tuple[str, int, int]]()
        self._by_place: dict[tuple[str, int, int], str] = {}
        self._by_life: dict[int, int] = {}  # process -> its newest generation
        self._excused: set[tuple[str, int, int]] = set()
        self._unlucky: set[int] = set()  # processes
        self._asked: dict[int, Counter[str]] = {}

    def sample(self, slot: str, generation: int, by: str, weights: int, *, logprobs: bool = False) -> "Bundle":
        from tests.sim.acting import bundle_of

        self.samples.append(Sample(slot, generation, by, weights))
        return bundle_of(len(self.samples) - 1, slot, generation, logprobs)

    @property
    def places(self) -> set[tuple[str, int]]:
        """The (slot, generation) that were trained."""
        return {(slot, generation) for slot, _, generation in self._by_place}

    # ------------------------------------------------------------ requests

    def counted(self, process: Process, verb: str, key: str) -> None:
        if key.startswith("rollouts/") and not key.endswith(".verdict"):
            self._asked.setdefault(process.id, Counter())[verb] += 1

    def requests(self, process: Process) -> Counter[str]:
        return self._asked.get(process.id, Counter()).copy()

    @property
    def is_calm(self) -> bool:
        """Whether nothing fails in this schedule, no actor is broken, and no completion is much longer than others."""
        p, a = self.w.plan, self.plan
        faults = p.error + p.lost + p.duplicate + p.kill + p.pause + p.slow + p.outage[0] + p.foreign + p.flip
        unseen = p.list_lag or p.mute or p.hung  # an actor cannot see which places are filled, or where a slot is
        return not (faults or unseen or a.mischief or a.deaths or a.stalls or a.tail or p.churn or p.fleet_loss)

    # ------------------------------------------------------------ what is trained

    def begins(self, process: Process, start: int) -> None:
        """A life begins in its data; with one fragment, after all inner steps of its slot's offers that count."""
        rv, rules = process.rv, self.w.plan.rules
        assert rv is not None
        offers = [o for c in self.w.observer.commits[: rv.step] for o in c.offers if o.slot == process.slot]
        if all(o.generation >= rv.generation or o.generation < rv.generation - 2 for o in offers) and rv.generation > 2:
            self._unlucky.add(process.id)
            self.w.fired["unlucky lives"] += 1
        if rules.fragments > 1 or self.w.plan.tau:
            return
        counted = sum(o.h for o in offers)
        if start != (counted if rv.generation > 1 else 0):
            self._broken("a replacement goes on in its data", f"{process.slot} at {start}, counted {counted}")

    def trained(
        self, process: Process, place: "BundlePlace", bundle: "Bundle", *, is_lost: bool, is_made: bool, took: float,
        asked: Counter[str],
    ) -> None:  # fmt: skip
        slot, number, where = process.slot, str(bundle.completions[0]), (process.slot, place.outer, place.generation)
        if self._by_life.get(process.id, -1) >= place.generation:
            self._broken("a life trains a place once", f"{where}")
        self._by_life[process.id] = place.generation
        self.w.fired[f"trained: {'its own' if self.samples[int(number)].by == slot else 'of an actor'}"] += 1
        if self.is_calm:
            self._cheap(process, where, is_made=is_made, took=took, asked=asked)
        if is_lost:
            self._excused.add(where)
            return
        self._stands(place, slot, number)
        if process.id in self._unlucky:
            self._is_own(process, place, number)
        else:
            self._same(where, number)

    def _stands(self, place: "BundlePlace", slot: str, number: str) -> None:
        told = [record for record, sample in self._bundles(place, slot) if sample == number]
        if not any(self._is_right(record, place, slot) for record in told):
            seen = [{k: r[k] for k in ("run", "slot", "place", "step", "actor")} for r in told]
            self._broken("only what stands and fits is trained", f"{slot} {place}, sample {number}: {seen}")
        true = self.samples[int(number)].weights
        honest = int(number) not in self.lies
        if (self.plan.share == 1.0 or honest) and true not in [record["step"] for record in told]:
            self._broken("no lie is trained", f"{slot} {place}: weights {true}, told {[r['step'] for r in told]}")

    def _is_own(self, process: Process, place: "BundlePlace", number: str) -> None:
        assert process.rv is not None
        by = [record["by"] for record, sample in self._bundles(place, process.slot) if sample == number]
        if by != [process.rv.generation]:
            self._broken("an unlucky life trains its own", f"{process.slot} {place}: by {by}")

    def _bundles(self, place: "BundlePlace", slot: str) -> list[tuple[dict[str, Any], str]]:
        """Return the whole bundles that stand in a place."""
        found, attempt = list[tuple[dict[str, Any], str]](), 0
        while (
            body := self.w.objects.get(f"rollouts/{slot}/{place.generation:010d}/0000.{attempt}.bundle")
        ) is not None:
            one = parsed(body)
            found += [one] if one is not None else []
            attempt += 1
        return found

    def _is_right(self, record: dict[str, Any], place: "BundlePlace", slot: str) -> bool:
        oldest = place.outer - (self.plan.staleness if record.get("actor") else 0)
        ours = record["run"] == "run" and record["slot"] == slot and record["place"] == [place.generation, 0]
        return ours and oldest <= record["step"] <= place.outer and (record["has logprobs"] or not record.get("actor"))

    def _same(self, where: tuple[str, int, int], number: str) -> None:
        before = self._by_place.setdefault(where, number)
        if before != number and where not in self._excused:
            self._broken("all lives of a slot train the same bundle", f"{where}: samples {before} and {number}")

    def _cheap(
        self, process: Process, where: tuple[str, int, int], *, is_made: bool, took: float, asked: Counter[str]
    ) -> None:
        from tests.sim.acting import SAMPLE_S

        if took > SAMPLE_S * self.plan.length_of(where[0], where[2]) / 0.9 + SLACK_S:
            self._broken("no replica waits for an actor", f"{where} took {took:.1f} s")
        now = self.requests(process) - asked
        is_first = f"rollouts/{where[0]}/{where[2]:010d}/0000.1.bundle" not in self.w.objects
        if is_first and is_made and now != Counter(get=1, create=1):
            self._broken("one GET and one PUT", f"{where}: {dict(now)}")
        if is_first and not is_made and not now["create"] and not self.plan.share and now != Counter(get=1):
            self._broken("one GET and one PUT", f"{where}: {dict(now)}")

    # ------------------------------------------------------------ at the end

    def finish(self, commits: "list[Commit]") -> None:
        if self.w.plan.rules.fragments == 1 and not self.w.plan.tau:
            for offer in (offer for commit in commits for offer in commit.offers):
                steps = self.steps[offer.slot, offer.generation, offer.step]
                if steps < offer.h:
                    self._broken("an offer has its inner steps", f"{offer.slot} step {offer.step}: {steps} < {offer.h}")
        late, stand = self.delivered[False], self.delivered[True]
        if self.is_calm and late + stand > 20 and late > WASTE * (late + stand):
            self._broken("few bundles come too late", f"{late} of {late + stand}")
        old = self.w.fired["too old"]
        if self.is_calm and stand > 20 and old > 0.05 * stand:
            self._broken("few bundles are too old", f"{old} of {stand}")

    def _broken(self, promise: str, seen: str) -> None:
        self.w.observer.broken(promise, seen)
