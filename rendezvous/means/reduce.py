"""The mean of a commit, with the same bits for every reader.

    mean = ( fl(w₁·x₁) + fl(w₂·x₂) + … ) / fl(Σ wᵢ)        in listed order, each operation rounded to fp32

direct     every reader fetches every listed blob except its own
sharded    the owner of part j fetches its range of every blob and announces the part's mean; all readers fetch all
           parts (parts.py)
announced  the closer has stored the mean and its digest.  A later reader fetches one blob instead of N, and needs no
           listed blob, which may be damaged by then

    bodies.py  listed blobs ──▶ bytes that have their digests ──▶ Reducer ──▶ mean ──▶ announcements.py

numpy, the codecs' `accumulate` and the C kernels round the product and the sum separately on every CPU, so all replicas
get the same bits.  Every reader leaves out a body that no encoder could have written:

    Σ of all listed ── finite ───────────────────────────────▶ ÷ Σ weights                   the usual case
         │ not finite, or bytes that cannot be decoded
         ▼
    in each shard of the fixed grid:   Σ of the valid bodies ÷ Σ of their weights
                                       0 for an element that still overflows, and in a shard without a valid body

A body is valid if its bytes decode and every value is finite.  A body is left out before this check if, by its record,
its length or its number of shards differs from the fragment's.  The result depends only on the commit and on bytes with
the announced digests.  So all replicas leave out the same bodies, however many shards they fetch at a time.  A sum is
finite only if all its terms are finite, so usually no body is checked separately.

Not promised: long waits (a body that cannot be read is Corrupt after a few seconds; averaging.py waits longer); a check
of values that are finite but wrong.
"""

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from rendezvous.agreement import rules
from rendezvous.agreement.rules import Rules
from rendezvous.background import Emit, Together, in_turn
from rendezvous.clock import Clock
from rendezvous.codecs import get_codec, load_mean_kernel
from rendezvous.errors import BadCommit, Corrupt
from rendezvous.means.announcements import Announcements
from rendezvous.means.bodies import BodyReader, OwnBody, Shard, elements_slice, total_weight
from rendezvous.records.records import Commit, Listed
from rendezvous.store import Store

if TYPE_CHECKING:
    from rendezvous.means.body_sample import BodySample
    from rendezvous.means.parts import MeanParts


class Reducer:
    """The means of commits; from another source if a blob is bad.

    together: runs the requests for several bodies; `in_turn` reads the bodies one after the other.
    """

    def __init__(
        self, store: Store, clock: Clock, emit: Emit, rules: Rules | None = None, *, together: Together = in_turn
    ) -> None:
        self._clock = clock
        self.emit = emit
        self.rules = rules or Rules()
        self._codec = self.rules.codec
        self.bodies = BodyReader(store, clock, self.rules, together)
        self.announcements = Announcements(store, clock, emit)
        self.sample: BodySample | None = None  # set by a caller that needs one
        self._one_pass = load_mean_kernel(self._codec)
        self._reported_blobs = set[str]()

    @cached_property
    def parts(self) -> "MeanParts":
        """The same means in parts, for sharded steps and for audits."""
        from rendezvous.means.parts import MeanParts

        return MeanParts(self)

    def mean(self, commit: Commit, out: np.ndarray, mine: OwnBody | None = None) -> None:
        """Write the mean of `commit` into `out` (fp32, the fragment's length).

        Raise Corrupt if it cannot be computed; `out` then has undefined values.
        """
        if commit.mode == "sharded":
            return self.parts.read_all(commit, out)
        for pause in (0.1, 0.5, 2.0, 5.0):
            if mine is None and self._read_announced(commit, out):
                return
            trouble = self.mean_of_shards(commit, self.bodies.grid(out.size), out, mine)
            if trouble is None:
                return
            self.emit("bad_blob", step=commit.t, trouble=trouble)
            if mine is not None and self._read_announced(commit, out):
                return
            self._clock.sleep(pause)
        raise Corrupt(
            f"step {commit.t}: {trouble}, and no announced mean can be read instead. Nothing was averaged. Restore the "
            f"object from a backup, or train from an earlier step: diloco train CONFIG --run NEW --from RUN@{commit.t}"
        )

    def _read_announced(self, commit: Commit, out: np.ndarray) -> bool:
        """Read the announced mean; if its copy is damaged, compute it and upload it again.

        Return whether `out` holds the announced mean.
        """
        _, record = self.announcements.find(commit.t, 0)
        if record is None:
            return False
        if self.announcements.fetch(record, out) is None:
            return True
        trouble = self.mean_of_shards(commit, self.bodies.grid(out.size), out, None)
        return trouble is None and self.announcements.put_back(record, out)

    # ---------------------------------------------------------------- the sum

    def mean_of_shards(
        self,
        commit: Commit,
        shards: list[Shard],
        out: np.ndarray,
        mine: OwnBody | None,
        packed: np.ndarray | None = None,
    ) -> str | None:
        """Write the listed bodies' mean in these shards to their place in `out`.   Return None, or why it failed.

        packed: memory for the encoded mean; `out` then holds the mean as every reader decodes it from there.
        """
        offers = self._fitting_offers(commit, out.size)
        if self.sample is not None:
            self.sample.begin(commit)
        for group in self.bodies.groups(commit, shards):
            rows = None if packed is None else packed[self.bodies.place_in_part(shards, group)]
            try:
                trouble = self._mean_of_all(offers, group, out, mine, rows)
            except Corrupt:
                if self.sample is not None:
                    self.sample.clear()
                from rendezvous.means.poison import mean_of_valid

                trouble = mean_of_valid(self, commit, offers, group, out, mine)
                if trouble is None:
                    self._pack_mean(out[elements_slice(group)], rows)
            if trouble is not None:
                return trouble
        return None

    @np.errstate(over="ignore", invalid="ignore")
    def _mean_of_all(
        self, offers: list[Listed], group: list[Shard], out: np.ndarray, mine: OwnBody | None, rows: np.ndarray | None
    ) -> str | None:
        """Write the mean of all offers.   Raise Corrupt if the mean is not finite, or if a body is invalid."""
        total = out[elements_slice(group)]
        bodies = list[np.ndarray]()
        read = self.bodies.read_bodies(offers, group, mine, one_by_one=self._one_pass is None)
        for listed, body in zip(offers, read, strict=True):
            if isinstance(body, str):
                return body
            if self.sample is not None:
                self.sample.note_body(listed, body, group[0].start, group[-1].stop)
            if self._one_pass is None:
                self.add_body(total, body, listed.weight, first=listed is offers[0])
            else:
                bodies.append(body)
        if not offers or not self._divide_and_pack(offers, bodies, total, rows):
            raise Corrupt("the mean is not finite")
        return None

    def _divide_and_pack(
        self, offers: list[Listed], bodies: list[np.ndarray], total: np.ndarray, rows: np.ndarray | None
    ) -> bool:
        """Write the mean of all bodies, or of the sum in `total`, to `total`.   Return whether it is finite."""
        if self._one_pass is not None:
            return self._one_pass(bodies, [o.weight for o in offers], float(total_weight(offers)), total, rows)
        from rendezvous.means.sums import divide_by_weight

        finite = divide_by_weight(total, total_weight(offers))
        if finite:
            self._pack_mean(total, rows)
        return finite

    def _pack_mean(self, mean: np.ndarray, rows: np.ndarray | None) -> None:
        """Set rows ← encode(mean), mean ← decode(rows)."""
        if rows is not None:
            get_codec(self._codec).encode(mean, rows)
            get_codec(self._codec).decode(rows, mean)

    def _fitting_offers(self, commit: Commit, elements: int) -> list[Listed]:
        """Return the listed bodies whose records fit this fragment; report the other bodies."""
        flaws = [(o, self.bodies.record_flaw(o, elements)) for o in commit.offers]
        for listed, why in flaws:
            if why:
                self.report_poisoned(commit, listed, why)
        return [listed for listed, why in flaws if not why]

    def report_poisoned(self, commit: Commit, listed: Listed, why: str) -> None:
        """Report once that a body counts for nothing."""
        if listed.blob not in self._reported_blobs:
            self._reported_blobs.add(listed.blob)
            self.emit("poisoned", step=commit.t, slot=listed.slot, blob=listed.blob, text=f"counts for nothing: {why}")

    def add_body(self, total: np.ndarray, body: np.ndarray, weight: float, *, first: bool) -> None:
        if self._codec == "fp32":
            from rendezvous.means.sums import accumulate

            accumulate(total, body.view(np.float32), weight, first=first)
        else:
            get_codec(self._codec).accumulate(body, weight, total, first)


def refuse_misweighed(commit: Commit, rules_: Rules) -> None:
    """Raise BadCommit unless the commit has the rules' weights.  Every reader calls this before it averages."""
    for found, due in zip(commit.offers, rules.with_weights(commit.offers, commit.t, rules_), strict=True):
        if found != due:
            raise BadCommit(
                f"commit {commit.t} by {commit.by} gives {found.slot}'s offer for step {found.step} the weight "
                f"{found.weight} (factor {found.factor}), by the run's rules it is {due.weight} (factor {due.factor}). "
                "Nothing was averaged: replicas of different releases must not share a run. Export an earlier step, "
                "and start a new run from it"
            )
