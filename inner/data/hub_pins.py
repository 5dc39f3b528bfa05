"""Find the commit to which a name on the Hub points now, for a model or a dataset.

    pin_commit("dataset", "openai/gsm8k", "main", …) ──▶ 40 hexadecimal digits      one request; none if it is a commit

Not promised: that the Hub keeps the commit.  No torch here.
"""

import os
import re

from inner.errors import InnerError
from inner.models.naming import ASK_S

PREFIX = "hub:"
_COMMIT = re.compile("[0-9a-f]{40}")
_PAGES = {"model": "https://huggingface.co/", "dataset": "https://huggingface.co/datasets/"}


def pin_commit(kind: str, name: str, revision: str, setting: str) -> str:
    """Return the commit.   kind: "model" or "dataset".   revision: "" for main.   setting: for errors (InnerError)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if _COMMIT.fullmatch(revision):
        return revision
    try:
        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        return str(api.repo_info(name, repo_type=kind, revision=revision or None, timeout=ASK_S).sha)
    except GatedRepoError:
        raise InnerError(gated_text(kind, name, setting)) from None
    except RevisionNotFoundError:
        raise InnerError(f"{setting}: the Hub has no such revision of it. Correct {revision!r}.") from None
    except RepositoryNotFoundError:
        raise InnerError(
            f"{setting}: the Hub knows no such {kind} (or it is private, and no token here may read it). Correct the "
            "name, or `hf auth login`."
        ) from None
    except Exception as error:
        raise InnerError(
            f"{setting}: the Hub gave no answer ({first_line(error)}) Try again; or name a commit that is in the cache "
            f"of this machine: hub:{name}@COMMIT."
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
