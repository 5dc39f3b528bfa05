"""Prompts out of a dataset on the Hub, read with `datasets` on the machine that founds or checks a run.

    hub:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]         hub:openai/gsm8k/main:train[:500]
         pin_dataset  ─▶ hub:openai/gsm8k@<commit>/…    one request; run.json has it so
         read_dataset ─▶ rows                           from the Hub's cache on this machine, filled when it must be

Not promised: a dataset that needs code of its own (`datasets` has given those up); images and sound.  No torch here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from inner.data.hub_pins import PREFIX, first_line, gated_text, pin_commit
from inner.errors import InnerError

_SPELLING = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<config>[^:/]+))?(:(?P<split>.+))?", re.ASCII
)
_CARRIED = "Replicas need no token for it: the run carries the rows."


@dataclass(frozen=True)
class HubDataset:
    """revision, config, split: "" if the spelling has none."""

    name: str
    revision: str = ""
    config: str = ""
    split: str = ""

    @classmethod
    def parse(cls, spelling: str, setting: str) -> Self:
        """setting: the one that has it, for the message.   Raises InnerError."""
        found = _SPELLING.fullmatch(spelling)
        if found is None:
            raise InnerError(
                f"{setting} = {spelling!r} is not a dataset's name. Write hub:OWNER/NAME/CONFIG:SPLIT, such as "
                "hub:openai/gsm8k/main:train; @REVISION may follow the name, and CONFIG may be left out where there is "
                "one only."
            )
        return cls(**{key: value or "" for key, value in found.groupdict().items()})

    def __str__(self) -> str:
        marks = (("@", self.revision), ("/", self.config), (":", self.split))
        return PREFIX + self.name + "".join(mark + part for mark, part in marks if part)


def pin_dataset(dataset: HubDataset, setting: str) -> HubDataset:
    """Return the dataset at the commit that its revision (default: main) names now.   Raises InnerError."""
    what = f"{setting} = '{dataset}'"
    return replace(dataset, revision=pin_commit("dataset", dataset.name, dataset.revision, what))


def read_dataset(dataset: HubDataset, setting: str) -> Iterator[tuple[str, Any]]:
    """("row 3", the row), …   Raises InnerError."""
    what = f"{setting} = '{dataset}'"
    try:
        from datasets import disable_progress_bars, load_dataset
    except ModuleNotFoundError as missing:
        raise InnerError(f"{what} needs {missing.name} to be read: pip install 'serverless-diloco[train]'") from missing
    disable_progress_bars()
    try:
        rows: Any = load_dataset(
            dataset.name, dataset.config or None, split=dataset.split, revision=dataset.revision or None
        )
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
    except Exception as error:  # of the Hub, the disk, pyarrow; `datasets` says which configs and splits there are
        cause = error.__cause__ or error
        if "BatchSize must be greater than 0" in str(cause):  # datasets 5.2 at a Parquet file without rows
            return
        if "is a gated dataset" in str(cause):
            raise InnerError(f"{gated_text('dataset', dataset.name, what)} {_CARRIED}") from None
        raise InnerError(
            f"{what} cannot be read: {first_line(cause)} Write hub:OWNER/NAME/CONFIG:SPLIT as the dataset's page has "
            f"it: https://huggingface.co/datasets/{dataset.name}"
        ) from error
