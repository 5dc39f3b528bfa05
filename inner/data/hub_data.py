"""Read prompts from a dataset on the Hub, with `datasets`, on the machine that creates or checks a run.

    hub:OWNER/NAME[@REVISION][/CONFIG][:SPLIT]         hub:openai/gsm8k/main:train[:500]
         pin_dataset  ─▶ hub:openai/gsm8k@<commit>/…    one request; run.json has this name
         read_dataset ─▶ rows                           from this machine's cache, downloaded if missing

    pin_commit("dataset", "openai/gsm8k", "main", …) ──▶ 40 hexadecimal digits   one request; none for a commit

Not promised: that the Hub keeps the commit; a dataset with its own code (`datasets` no longer runs it); images and
sound.  No torch here.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from inner.errors import InnerError
from inner.models.hub_model import COMMIT, hub_endpoint
from inner.models.naming import ASK_S
from inner.network import network_words

PREFIX = "hub:"
_PAGES = {"model": "https://huggingface.co/", "dataset": "https://huggingface.co/datasets/"}
_SPELLING = re.compile(
    r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?(/(?P<config>[^:/]+))?(:(?P<split>.+))?", re.ASCII
)
_CARRIED = "Replicas need no token for it: the run carries the rows."


@dataclass(frozen=True)
class HubDataset:
    """A dataset's name.   revision, config, split: "" if the spelling has none."""

    name: str
    revision: str = ""
    config: str = ""
    split: str = ""

    @classmethod
    def parse(cls, spelling: str, setting: str) -> Self:
        """Parse a spelling.   setting: the setting's name, for the message.   Raises InnerError."""
        found = _SPELLING.fullmatch(spelling)
        if found is None:
            raise InnerError(
                f"{setting} = {spelling!r} is not a dataset's name. Write hub:OWNER/NAME/CONFIG:SPLIT, such as "
                "hub:openai/gsm8k/main:train; @REVISION may follow the name, and CONFIG may be left out if the "
                "dataset has only one."
            )
        return cls(**{key: value or "" for key, value in found.groupdict().items()})

    def __str__(self) -> str:
        marks = (("@", self.revision), ("/", self.config), (":", self.split))
        return PREFIX + self.name + "".join(mark + part for mark, part in marks if part)


def pin_dataset(dataset: HubDataset, setting: str) -> HubDataset:
    """Return the dataset at the commit to which its revision (default: main) points.   Raises InnerError."""
    what = f"{setting} = '{dataset}'"
    return replace(dataset, revision=pin_commit("dataset", dataset.name, dataset.revision, what))


def read_dataset(dataset: HubDataset, setting: str) -> Iterator[tuple[str, Any]]:
    """Yield ("row 3", the row) for each row.   Raises InnerError."""
    what = f"{setting} = '{dataset}'"
    try:
        from datasets import disable_progress_bars, load_dataset
    except ModuleNotFoundError as missing:
        raise InnerError(f"reading {what} needs {missing.name}: pip install 'serverless-diloco[train]'") from missing
    disable_progress_bars()
    if Path(dataset.name).is_dir():
        raise InnerError(
            f"{what}: this folder has a folder {dataset.name}, which `datasets` would read instead of the Hub's "
            "dataset. Run the command elsewhere, or rename that folder."
        )
    try:
        rows: Any = load_dataset(
            dataset.name, dataset.config or None, split=dataset.split, revision=dataset.revision or None
        )
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
    except Exception as error:  # an error of Hub, disk or pyarrow; its text lists configs and splits
        cause = error.__cause__ or error
        if "BatchSize must be greater than 0" in str(cause):  # datasets 5.2, for a Parquet file without rows
            return
        if "is a gated dataset" in str(cause):
            raise InnerError(f"{gated_text('dataset', dataset.name, what)} {_CARRIED}") from None
        raise InnerError(
            f"{what} cannot be read: {first_line(cause)} Write hub:OWNER/NAME/CONFIG:SPLIT as the dataset's page has "
            f"it: https://huggingface.co/datasets/{dataset.name}"
        ) from error


# -------------------------------------------------------------------- commits, of models too


def pin_commit(kind: str, name: str, revision: str, setting: str) -> str:
    """Return the commit.   kind: "model" or "dataset".   revision: "" for main.   setting: its name, for errors."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if COMMIT.fullmatch(revision):
        return revision
    try:
        api = HfApi(endpoint=hub_endpoint())
        return str(api.repo_info(name, repo_type=kind, revision=revision or None, timeout=ASK_S).sha)
    except GatedRepoError:
        raise InnerError(gated_text(kind, name, setting)) from None
    except RevisionNotFoundError:
        raise InnerError(f"{setting}: the Hub has no revision {revision!r} of it. Correct that name.") from None
    except RepositoryNotFoundError:
        raise InnerError(
            f"{setting}: the Hub knows no such {kind} (or it is private, and no token here may read it). Correct the "
            "name, or `hf auth login`."
        ) from None
    except Exception as error:
        raise InnerError(
            f"{setting}: the Hub gave no answer: {network_words(error)}. Try again, or name a commit that is in the "
            f"cache of this machine: hub:{name}@COMMIT."
        ) from error


def gated_text(kind: str, name: str, setting: str) -> str:
    return (
        f"{setting} is gated: the token of this machine may not read it. Accept its terms at {_PAGES[kind]}{name}, "
        "and `hf auth login`."
    )


def first_line(error: BaseException) -> str:
    """Return the error's first two lines (the second may list the choices), without `datasets`' example calls."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and "load_dataset" not in line]
    text = " ".join(line for line in lines[:2] if "Example of usage" not in line) or type(error).__name__
    return f"{text.rstrip('.!')}."
