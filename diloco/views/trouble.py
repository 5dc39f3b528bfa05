"""One trouble of a run, as people and webhooks hear it.

    Trouble("stalled", "", 12, "no outer step for 6 min 10 s, …", "`diloco logs RUN …`", "stalled")
            kind       slot step what was seen, with numbers  the next thing to do  anchor in docs/troubles.md

A trouble is there as long as a detector finds it: kind and slot name it, text and step may move on meanwhile.

Not promised: that a trouble is a fault; each says what was seen, and a person judges.
"""

from dataclasses import dataclass

PAGE = "docs/troubles.md"


@dataclass(frozen=True)
class Trouble:
    """kind: a short word that stays.   slot: "" for the whole run.   step: the outer step where it began.

    text: what was seen.   advice: the next thing to do.   page: anchor in docs/troubles.md.
    """

    kind: str
    slot: str
    step: int
    text: str
    advice: str
    page: str

    @property
    def key(self) -> tuple[str, str]:
        """Identity of the trouble: the same at two looks."""
        return self.kind, self.slot

    @property
    def line(self) -> str:
        """The trouble in a line of words."""
        about = f"{self.slot}: " if self.slot else ""
        return f"{about}{self.text}. {self.advice} ({PAGE}#{self.page})"


@dataclass(frozen=True)
class Spending:
    """The run's cost, as executors reckon it.   hours: with any replica running."""

    usd: float = 0.0
    hours: float = 0.0
    usd_per_hour: float = 0.0


def trouble(kind: str, text: str, advice: str, *, step: int, slot: str = "") -> Trouble:
    """Make one; its page is its kind."""
    return Trouble(kind, slot, step, text, advice, page=kind)
