"""How far a series of records goes:   key(0) ● key(1) ● … key(n−1) ●  key(n) ○        n = ?

    not there yet known     low, low+1, low+3, low+7, …        galloping, all in one round
    between low and high    FAN keys, evenly spaced            until nothing is left between them

Commits, claims, control records and logs are numbered without gaps, and none of them is ever deleted, so a few rounds
of GETs find their number; LIST may lag, and lists a page of 1,000 keys at a time.

Not promised: the number in a series with a gap, be it one that somebody edited: a reader that then reads from the
first record on meets the gap.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco.runlog.ahead import Ahead

FAN = 16  # keys asked for at once between two bounds
Numbered = Callable[[int], str]  # n -> key


@dataclass
class Series:
    """low: so many are there for sure.   high: this one is not.   reach: how many keys the galloping asks for.
    then(n): what to do once it is known that there are n."""

    key: Numbered
    low: int
    reach: int
    then: Callable[[int], None]
    high: int | None = None

    @property
    def probes(self) -> list[int]:
        if self.high is None:
            return [self.low + (1 << j) - 1 for j in range(self.reach)]
        return sorted({self.low + (self.high - self.low) * i // (FAN + 1) for i in range(FAN + 1)})

    @property
    def over(self) -> bool:
        return self.low == self.high

    def learn(self, ahead: Ahead) -> None:
        """From the answers to the probes."""
        for n in self.probes:
            if not ahead.is_there(self.key(n)):
                self.high = n
                return
            self.low = n + 1


@dataclass
class Rounds:
    """Series and keys that go together: each round asks for all that is known to be needed by then."""

    ahead: Ahead
    _series: list[Series] = field(default_factory=list[Series])
    _keys: list[str] = field(default_factory=list[str])
    _after: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    def count(self, key: Numbered, low: int, reach: int, then: Callable[[int], None]) -> None:
        self._series.append(Series(key, low, reach, then))

    def want(self, keys: list[str], then: Callable[[], None] = lambda: None) -> None:
        """then: what to do once all of them have been asked for."""
        self._keys += keys
        self._after.append(then)

    def run(self) -> None:
        while self._series or self._keys or self._after:
            series, keys, after = self._series, self._keys, self._after
            self._series, self._keys, self._after = [], [], []
            self.ahead.ask([*keys, *(s.key(n) for s in series for n in s.probes)])
            for s in series:
                s.learn(self.ahead)
            for then in after:
                then()
            for s in series:
                if s.over:
                    s.then(s.low)
                else:
                    self._series.append(s)
