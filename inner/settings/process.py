"""[inner.process]: scores of single turns, beside the reward of the whole rollout.

    A_t  =  A  +  weight · Σ z_k        z_k: turn k's score, normalised over the k-th turns of the same prompt

    credit = "turn"     Σ over the turn that contains token t
    credit = "rest"     Σ over that turn and all later turns

    function = "process.py:score"       the user's own: rollouts -> a score per turn
    head = "head.safetensors"           a head that `train_process_head` trained on traces

Not promised: that higher scores from teachers lead to a higher reward.  The model learns to raise the score.
No torch here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from inner.errors import InnerError
from inner.settings.tables import Table, setting

CREDITS = ("turn", "rest")
HEAD_FORM = "process head 1"  # file format, in the metadata of a head's file
WHOLE_SEQUENCE_LOSSES = ("gmpo",)  # loss types whose formula has one advantage per rollout


@dataclass(frozen=True)
class ProcessSettings(Table):
    """Scores of single turns, beside the reward."""

    path: ClassVar[str] = "inner.process"

    weight: float = setting(1.0, "w, the weight of a turn's advantage beside that of its rollout.", above=0)
    credit: str = setting(
        "turn",
        'The tokens that learn from a turn\'s score: "turn" its own, "rest" also those before it.',
        one_of=CREDITS,
    )
    function: str | None = setting(
        None, '`"process.py:score"`: a score, or None, for each turn of each rollout (docs/channels.md).'
    )
    head: str | None = setting(None, "Learned scorer that replaces `function`: a .safetensors of `ProcessHead.save`.")

    def check(self) -> None:
        if (self.function is None) == (self.head is None):
            raise InnerError(
                f"[inner.process] needs one of inner.process.function = {self.function!r} and inner.process.head = "
                f'{self.head!r}. Set inner.process.function = "process.py:score", or leave the table out.'
            )


def read_head_width(path: Path) -> int:
    """Return D, the width of the hidden states that a head reads, from its file's header.

    Raises InnerError if the file does not hold a head.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy") as file:
            metadata = file.metadata() or {}
        if metadata.get("form") != HEAD_FORM:
            raise ValueError(f"its metadata are {metadata}")
        return int(metadata["width"])
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise InnerError(
            f"{path} is not a process head: {error}. Write it with `train_process_head(…)[0].save(path)`."
        ) from error
