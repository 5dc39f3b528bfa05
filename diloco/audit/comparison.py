"""Compare a pseudogradient that was computed again with its offer.

    Δ ─codec─▶ the offer's digest? ─▶ equal, to the byte
                     │ no
    ‖mine − offered‖ / ‖offered‖ ≤ CLOSE ─▶ close: another machine rounds in other places
                     │ no
    a doubt: other library versions, rollouts that are gone ─▶ not checked, with the doubt
                     │ none
                  differs: another pseudogradient than these rollouts, rows and settings give

Not promised: that an equal pseudogradient came from honest rollouts; replica/door.py checks rollouts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from diloco.audit.verdict import UNSEEN, Difference, Verdict
from diloco.process.processes import library_versions
from diloco.run.record import Run
from diloco.runlog.reader import Report, read_report
from diloco.runlog.sessions import versions_in
from rendezvous.agreement.membership import read_claim
from rendezvous.codecs import get_codec
from rendezvous.keeping.garbage import blob_stands
from rendezvous.records.digests import required_digest_kind
from rendezvous.records.records import Offer
from rendezvous.records.wire import Encoder, codec_alignment, shard_grid
from rendezvous.store import Store

CLOSE = 1e-2  # part of ‖Δ‖: sums on another processor differ by about 1e-6, and Adam enlarges this for small gradients


class Holder(NamedTuple):
    """A session: its slot and generation."""

    slot: str
    generation: int

    def __str__(self) -> str:
        return f"{self.slot}-{self.generation}"


@dataclass
class Recomputed:
    """The result.   off: offers that differ, as (step, blob, slot, text).   unchecked: parts that were not checked.

    stopped: how many sessions could not be followed on this machine, for example without a package of the user's code.
    """

    equal: int = 0
    close: list[float] = field(default_factory=list[float])
    off: list[tuple[int, str, str, str]] = field(default_factory=list[tuple[int, str, str, str]])
    remade: int = 0
    stopped: int = 0
    unchecked: list[str] = field(default_factory=list[str])

    def add_to(self, verdict: Verdict) -> None:
        """Add these findings to those of `verify`."""
        verdict.differences += [Difference(*one) for one in self.off]
        verdict.unchecked = [one for one in verdict.unchecked if one != UNSEEN] + self.unchecked
        verdict.inner, verdict.stopped = self.in_words(), self.stopped

    def in_words(self) -> str:
        near = f", {len(self.close)} within {max(self.close):.0e} of their length" if self.close else ""
        made = f"; {self.remade} bundles of rollouts were not recorded and were made again" if self.remade else ""
        return f"pseudogradients computed again: {self.equal} equal to the byte{near}, {len(self.off)} differ{made}"


class OfferComparison:
    """The comparison of one session's offers with their pseudogradients; writes its findings into `to`."""

    def __init__(self, run: Run, store: Store, holder: Holder, to: Recomputed) -> None:
        self._run = run
        self._store = store
        self._holder = holder
        self._to = to
        self._rules = run.config.outer.rules
        self._encoder = Encoder(self._rules.codec, digests=required_digest_kind(store))
        self._blind = False  # whether rollouts were lost that cannot be made again

    def compare(
        self, delta: np.ndarray, theta: np.ndarray, offer: Offer, *, lost: str, doubt: str, taken: Mapping[int, int]
    ) -> None:
        """Compare Δ, computed from θ, with the offer.

        lost: the rollouts that are gone, or ""; after a loss nothing is compared.
        doubt: why a difference would be no fault, or "".
        taken: outer step -> bundles of other processes from which Δ was computed.
        """
        if self._blind or lost:
            return self._note_blindness(offer, lost)
        ranges = shard_grid(delta.size, codec_alignment(self._rules.codec), self._rules.shard_elements)
        written = self._encoder.encode_in_shards(0, delta, ranges, theta)
        if written.digest == offer.digest:
            self._to.equal += 1
            return
        share = self._difference(written.body, offer, delta.size)
        if share is not None and share <= CLOSE:
            self._to.close.append(share)
            return
        how = "" if share is None else f", which differs from it by {share:.1g} of its length"
        if doubts := self._other_versions or doubt or self._lost_beginning or self._unlike_the_log(offer.step, taken):
            text = f"the pseudogradient of {self._holder} in step {offer.step} differs{how}, and {doubts}"
            self._to.unchecked.append(text)
            return
        text = f"its rollouts, rows and settings give another pseudogradient{how}"
        self._to.off.append((offer.step, offer.blob, str(self._holder), text))

    @cached_property
    def _other_versions(self) -> str:
        """Return the libraries whose versions here differ from the session's; "" if all are equal or unknown."""
        here = versions_in(library_versions())
        found = [x.versions for x in self._report.sessions if (x.slot, x.generation) == self._holder]
        other = [f"{name} {v}, here {here[name]}" for x in found for name, v in x.items() if here.get(name, v) != v]
        return f"the session ran {'; '.join(other)}. Check it with the session's versions" if other else ""

    @cached_property
    def _lost_beginning(self) -> str:
        """Return why it is not known how the session began; "" if it is known.

        Without its predecessor's leave record, only its log tells whether it took over moments or a residual."""
        slot, generation = self._holder
        told = [event["event"] for event in self._report.events if event["who"] == str(self._holder)]
        if generation > 1 and "inherited" in told:
            return f"it took over the state that {slot}-{generation - 1} left, and the record of that state is gone"
        if generation > 1 and not told:
            return f"its log is gone, so it is not known whether it took over the state of {slot}-{generation - 1}"
        is_claimed = read_claim(self._store, slot, generation) is not None
        return "" if is_claimed else "its claim is gone, so it is not known how many processes it had"

    def _unlike_the_log(self, step: int, taken: Mapping[int, int]) -> str:
        """Return why the session may have trained on other rollouts until this step; "" if its log tells of nothing.

        The store did not take some of its rollouts, or the session found fewer bundles of others than its places have
        now: it refused some, and its own bundles or its verdicts are gone, for example in an incomplete copy."""
        until = self._run.record.parent.outer_steps + step
        lost = [event for event in self._logged("rollouts_lost") if event["step"] <= until]
        if lost:
            return f"in outer step {lost[0]['step']}, {lost[0].get('text', '')}"
        for t in sorted(t for t in taken if t <= until):
            counts = [e.get("bundles") for e in self._logged("rollouts_found") if e["step"] == t]
            found = sum(count for count in counts if type(count) is int)
            if found < taken[t]:
                return f"its log tells of {found} bundles of others in outer step {t}, and {taken[t]} are in its places"
        return ""

    def _logged(self, kind: str) -> list[dict[str, Any]]:
        """Return the session's events of a kind that name an outer step."""
        told = [e for e in self._report.of_kind(kind) if (e["slot"], e["generation"]) == self._holder]
        return [event for event in told if type(event.get("step")) is int]

    @cached_property
    def _report(self) -> Report:
        return read_report(self._run.store)

    def _note_blindness(self, offer: Offer, lost: str) -> None:
        """Note once that from this offer on the session trained on rollouts that are gone."""
        if not self._blind:
            self._to.unchecked.append(f"pseudogradients of {self._holder} from step {offer.step} on: {lost}")
        self._blind = True

    def _difference(self, body: np.ndarray, offer: Offer, elements: int) -> float | None:
        """Return ‖mine − offered‖ / ‖offered‖; None if the offered bytes are gone."""
        if not blob_stands(self._store, offer.blob, offer.size):
            return None
        offered = np.empty(offer.size, np.uint8)
        self._store.get_into(offer.blob, offered.data)
        mine, theirs = (self._decoded(one, elements).astype(np.float64) for one in (body, offered))
        return float(np.linalg.norm(mine - theirs) / max(np.linalg.norm(theirs), 1e-30))

    def _decoded(self, body: np.ndarray, elements: int) -> np.ndarray:
        if self._rules.codec == "fp32":
            return body.view(np.float32)
        out = np.empty(elements, np.float32)
        get_codec(self._rules.codec).decode(body, out)
        return out
