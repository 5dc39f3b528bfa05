"""Prompts out of a dataset on the Hub, read with `datasets` on the machine that founds or checks a run.

    hub:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]         hub:openai/gsm8k/main:train[:500]
         pin_dataset  ─▶ hub:openai/gsm8k@<commit>/…    one request; run.json has it so
         read_dataset ─▶ rows                           from the Hub's cache on this machine, filled when it must be

Not promised: a dataset that needs code of its own (`datasets` has given those up); images and sound.  No torch here.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

from inner.errors import InnerError
from inner.known import ASK_S

PREFIX = "hub:"
_SPELLING = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<config>[^:/]+))?(:(?P<split>.+))?", re.ASCII
)
_COMMIT = re.compile("[0-9a-f]{40}")


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
                f"{setting} = {spelling!r} is no dataset's name. Write hub:OWNER/NAME/CONFIG:SPLIT, such as "
                "hub:openai/gsm8k/main:train; @REVISION may follow the name, and CONFIG may be left out where there is "
                "one only."
            )
        return cls(**{key: value or "" for key, value in found.groupdict().items()})

    def __str__(self) -> str:
        marks = (("@", self.revision), ("/", self.config), (":", self.split))
        return PREFIX + self.name + "".join(mark + part for mark, part in marks if part)


def pin_dataset(dataset: HubDataset, setting: str) -> HubDataset:
    """The same at the commit that its revision (default: main) names now.   Raises InnerError."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if _COMMIT.fullmatch(dataset.revision):
        return dataset
    what = f"{setting} = '{dataset}'"
    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        info = api.dataset_info(dataset.name, revision=dataset.revision or None, timeout=ASK_S)
    except GatedRepoError:
        raise InnerError(_GATED.format(what, dataset.name)) from None
    except RevisionNotFoundError:
        raise InnerError(f"{what}: the Hub has no such revision of it. Correct {dataset.revision!r}.") from None
    except RepositoryNotFoundError:
        raise InnerError(
            f"{what}: the Hub knows no such dataset (or it is private, and no token here may read it). Correct the "
            "name, or `hf auth login`."
        ) from None
    except Exception as error:
        raise InnerError(
            f"{what}: the Hub gave no answer ({_first_line(error)}). Try again; or name a commit that this machine has "
            f"in its cache: hub:{dataset.name}@COMMIT; or a file."
        ) from error
    return replace(dataset, revision=str(info.sha))


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
        if "gated" in str(cause):
            raise InnerError(_GATED.format(what, dataset.name)) from None
        raise InnerError(
            f"{what} cannot be read: {_first_line(cause)} Write hub:OWNER/NAME/CONFIG:SPLIT as the dataset's page has "
            f"it: https://huggingface.co/datasets/{dataset.name}"
        ) from error


def _first_line(error: BaseException) -> str:
    """With the line that lists what there is; without `datasets`' example of a call of its own."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "load_dataset" not in line]
    text = " ".join(line for line in lines[:2] if "Example of usage" not in line) or type(error).__name__
    return f"{text.rstrip('.!')}."


_GATED = (
    "{0} is gated: the token of this machine may not read it. Accept its terms at "
    "https://huggingface.co/datasets/{1}, and `hf auth login`. Replicas need no token for it: the run carries the rows."
)
