"""One trouble of a run, as views show it and webhooks send it.

    Trouble("stalled", "", 12, "no outer step for 6 min 10 s, …", "`diloco logs RUN …`", "stalled")
            kind       slot step the observation, in numbers  the next thing to do  anchor in docs/troubles.md

A trouble lasts as long as a detector finds it. Kind and slot identify it; its text and step may change.

Not promised: that a trouble is a fault; it is an observation, and you decide.
"""

from dataclasses import dataclass

PAGE = "docs/troubles.md"


@dataclass(frozen=True)
class Trouble:
    """A trouble.   kind: a short name, which is fixed.   slot: "" for the whole run.   step: where it began.

    text: the observation.   advice: the next thing to do.   page: anchor in docs/troubles.md.
    """

    kind: str
    slot: str
    step: int
    text: str
    advice: str
    page: str

    @property
    def key(self) -> tuple[str, str]:
        """The trouble's identity, which is the same at each look."""
        return self.kind, self.slot

    @property
    def line(self) -> str:
        """The trouble as one line of text."""
        about = f"{self.slot}: " if self.slot else ""
        return f"{about}{self.text}. {self.advice} ({PAGE}#{self.page})"


@dataclass(frozen=True)
class Spending:
    """The run's cost, as executors compute it.   hours: time with at least one running replica."""

    usd: float = 0.0
    hours: float = 0.0
    usd_per_hour: float = 0.0


def trouble(kind: str, text: str, advice: str, *, step: int, slot: str = "") -> Trouble:
    """Make a Trouble whose page is its kind."""
    return Trouble(kind, slot, step, text, advice, page=kind)
