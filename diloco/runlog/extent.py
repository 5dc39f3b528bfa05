"""Find the length n of a series of records:   key(0) ● key(1) ● … key(n−1) ●  key(n) ○

    no end known yet        low … low+3, low+7, low+15, …      the next few, then galloping, all in one round
    all of these are there  the same from there on, twice as far
    between low and high    FAN keys, evenly spaced            until no key is left between them

Commits, claims, control records and logs are numbered without gaps, and none of them is ever deleted. So a few rounds
of GETs find their number. A LIST may lag, and returns only 1,000 keys at a time.

Not promised: the number in a series with a gap, which only an edit of the bucket makes. A reader that reads from the
first record on finds the gap.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from rendezvous.stores.ahead import Ahead

FAN = 16  # keys requested at once between two bounds
CLOSE = 4  # successive keys; if a series grew by fewer, one round finds its length
FURTHEST = 10  # the farthest key of the galloping: low + 1,023
Numbered = Callable[[int], str]  # n -> key


@dataclass
class Series:
    """A series.   low: at least so many exist.   high: this one does not.   reach: number of keys of the galloping.
    then(n): called when the length n is known."""

    key: Numbered
    low: int
    reach: int
    then: Callable[[int], None]
    high: int | None = None

    @property
    def probes(self) -> list[int]:
        if self.high is None:
            galloping = {self.low + (1 << j) - 1 for j in range(self.reach)}
            return sorted(galloping | set(range(self.low, self.low + CLOSE)) if self.reach > 2 else galloping)
        return sorted({self.low + (self.high - self.low) * i // (FAN + 1) for i in range(FAN + 1)})

    @property
    def is_over(self) -> bool:
        return self.low == self.high

    def learn_from_probes(self, ahead: Ahead) -> None:
        """Narrow the bounds by the answers to the probes."""
        galloping = self.high is None
        ahead.refuse_silence(self.key(n) for n in self.probes)
        for n in self.probes:
            if not ahead.is_there(self.key(n)):
                self.high = n
                return
            self.low = n + 1
        if galloping:
            self.reach = min(FURTHEST, 2 * self.reach)


@dataclass
class Rounds:
    """Requests for series and keys; each round sends all requests that are known to be needed."""

    ahead: Ahead
    _series: list[Series] = field(default_factory=list[Series])
    _keys: list[str] = field(default_factory=list[str])
    _after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def count(self, key: Numbered, low: int, reach: int, then: Callable[[int], None]) -> None:
        self._series.append(Series(key, low, reach, then))

    def want(self, keys: list[str], then: Callable[[], None] = lambda: None) -> None:
        """Request these keys.   then: called when all of them were requested."""
        self._keys += keys
        self._after.append(then)

    @property
    def next_keys(self) -> list[str]:
        """The keys that the next round requests."""
        return [*self._keys, *(s.key(n) for s in self._series for n in s.probes)]

    def run(self) -> None:
        while self._series or self._keys or self._after:
            asked = self.next_keys
            series = self._series
            after = self._after
            self._series = []
            self._keys = []
            self._after = []
            self.ahead.ask(asked)
            for s in series:
                s.learn_from_probes(self.ahead)
            for then in after:
                then()
            for s in series:
                if s.is_over:
                    s.then(s.low)
                else:
                    self._series.append(s)
