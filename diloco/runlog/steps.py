"""Outer steps as views show them: the facts of their commits, and the numbers that replicas log.

    bytes ── read_commit ──▶ Decision        its fields are checked, not the chain (rendezvous/records/records.py)
    bytes from the cache ── kept_commit ──▶  the same without checks, because the cache has only checked bytes: a
                                             second read of 1,000 outer steps decodes 1,000 commits
    Decision ──▶ Step ◀── offers, "step" events of logs

Not promised: the parts of a commit that a replica needs: weights, digests, fences.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from diloco.runlog.learning import learning_numbers, reckonable
from rendezvous.records.records import Commit, Offer

PARTS = ("inner_s", "offer_s", "wait_s", "mean_s")
PART_NAMES = ("train", "offer", "wait", "mean")
NUMBERS = {
    "rho": "ρ {:.2f}", "effective_step": "η_eff {:.2f}", "cos_pair": "cos of replicas {:.2f}",
    "cross_term": "LoRA cross term {:.2g}", "mean_norm": "‖ḡ‖ {:.2g}",
}  # fmt: skip


class Counted(NamedTuple):
    """One offer that a commit lists.   factor: the norm gate's factor.   samples: number of its samples.

    zero: whether the offer's pseudogradient is zero."""

    step: int
    slot: str
    generation: int
    nonce: str
    factor: float = 1.0
    samples: float = 0.0
    zero: bool = False


class Decision(NamedTuple):
    """One commit.   prev: digest of the commit before.   snapshot: step of the newest snapshot that its writer knew."""

    t: int
    at: float
    by: str
    prev: str | None
    offers: tuple[Counted, ...]
    snapshot: int

    @property
    def fresh(self) -> tuple[Counted, ...]:
        return tuple(o for o in self.offers if o.step == self.t)


def read_commit(body: bytes) -> Decision:
    """Decode and check a commit's bytes.   Raises only WireError for bad bytes."""
    c = Commit.decode(body)
    offers = tuple(Counted(*(getattr(o, name) for name in Counted._fields)) for o in c.offers)
    return Decision(c.t, c.at, c.by, c.prev, offers, c.snapshot)


def kept_commit(body: bytes) -> Decision:
    """Decode a commit from the cache.   Raises WireError for another release's format."""
    try:
        raw = json.loads(body)
        offers = tuple(Counted(**{k: v for k, v in o.items() if k in Counted._fields}) for o in raw["offers"])
        return Decision(raw["t"], raw["at"], raw["by"], raw["prev"], offers, raw["snapshot"])
    except (ValueError, KeyError, TypeError):
        return read_commit(body)


@dataclass
class Step:
    """One committed outer step.   reward, h: slot -> value of its offer for this step, listed here or later.

    gated: slots whose weight the norm gate lowered.   empty: the mean was zero, so θ did not change.
    numbers: ρ, effective step, norms (diloco/outer/safety.py).
    samples: slot -> samples of its listed work.   snapshot: step of the newest snapshot at the commit.
    """

    t: int
    at: float
    by: str
    fresh: tuple[str, ...]
    carried: tuple[tuple[str, int], ...]
    linked: bool
    reward: dict[str, float] = field(default_factory=dict)
    h: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, dict[str, float]] = field(default_factory=dict)  # slot -> part -> seconds
    up: dict[str, int] = field(default_factory=dict)
    down: dict[str, int] = field(default_factory=dict)
    thetas: dict[str, str] = field(default_factory=dict)  # session -> digest of θ after this step
    gated: tuple[str, ...] = ()
    empty: bool = False
    numbers: dict[str, float] = field(default_factory=dict)
    learned: dict[str, dict[str, float]] = field(default_factory=dict)  # slot -> loss, … (diloco/runlog/learning.py)
    samples: dict[str, float] = field(default_factory=dict)
    snapshot: int = 0

    @property
    def mean_reward(self) -> float | None:
        rewards = [self.reward[s] for s in self.fresh if s in self.reward]
        return fmean(rewards) if rewards else None

    @classmethod
    def of_commit(cls, c: Decision, *, linked: bool) -> "Step":
        """Make a Step from its commit.   linked: the commit has the right digest of the commit before."""
        fresh = tuple(o.slot for o in c.fresh)
        carried = tuple((o.slot, o.step) for o in c.offers if o.step < c.t)
        step = cls(c.t, c.at, c.by, fresh, carried, linked)
        step.gated = tuple(dict.fromkeys(o.slot for o in c.offers if o.factor != 1.0))
        for o in (o for o in c.offers if o.samples):  # a commit may list a slot's late work beside its fresh work
            step.samples[o.slot] = step.samples.get(o.slot, 0.0) + o.samples
        step.empty = all(o.zero for o in c.offers)
        step.snapshot = c.snapshot
        return step

    def add_offer(self, slot: str, offer: Offer) -> None:
        self.h[slot] = offer.h
        self.learned[slot] = learning_numbers(stats := reckonable(offer.stats))
        if "reward" in stats:
            self.reward[slot] = stats["reward"]

    def part(self, name: str) -> float:
        """Return the mean seconds of one part, over the replicas that logged it."""
        values = [s[name] for s in self.seconds.values() if name in s]
        return fmean(values) if values else 0.0


def apply_step_events(steps: Sequence[Step], events: Iterable[dict[str, Any]]) -> None:
    """Add the replicas' logged numbers to each step."""
    for e in events:
        t = e.get("step", -1)
        if e["event"] == "step" and 0 <= t < len(steps):
            step = steps[t]
            slot = e["slot"]
            step.seconds[slot] = {p: e[p] for p in PARTS if p in e}
            step.empty = step.empty or e.get("empty") is True
            step.up[slot] = e.get("bytes_up", 0)
            step.down[slot] = e.get("bytes_down", 0)
            step.numbers |= {k: e[k] for k in (*NUMBERS, "outer_lr") if k in e and k not in step.numbers}
            if "theta" in e:
                step.thetas[e["who"]] = e["theta"]
            step.learned[slot] = {**step.learned.get(slot, {}), **learning_numbers(e)}
            if e.get("reward") is not None:
                step.reward.setdefault(slot, e["reward"])
