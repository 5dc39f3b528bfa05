"""Boxes on Hugging Face Jobs: dedicated sandboxes of huggingface_hub, one job each.

    HfBoxes()                    flavor cpu-basic; the token is the SDK's: HF_TOKEN, or the token of `hf auth login`
    owner.labels ─▶ box-run …    labels of the job; by them we find a box even if its create's reply was lost
    ttl_s ─▶ idle_timeout        the job ends itself after so long without a call, in any case after 24 h
    user "root" ─▶ root          any other ─▶ uid 1000, by setpriv

We do not use SandboxPool: its boxes have no labels, and only paths below their own home, so /tests would be elsewhere.

Not promised: the SDK's interface, which is experimental. Tested with huggingface_hub 2.4 and a server of the tests, not
with the Hub.
"""

import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from inner.errors import InnerError
from inner.extras.boxes.box import (
    ANSWER_S,
    KILL_AFTER_S,
    MADE_BY,
    BoxGone,
    BoxOwner,
    BoxRecipe,
    ProviderFailed,
    Ran,
    as_user,
    fitting_words,
    read_output,
    wrapped_command,
)
from inner.tasks.harbor import HF_ONLINE, build_fault

IMAGE, FLAVOR = "python:3.12", "cpu-basic"
PER_HOUR = {"second": 3600, "minute": 60, "hour": 1}  # the Hub's units of a price
FOLDER = "BOX_FOLDER"  # an environment variable of the job, since a label cannot have slashes
STARTS_S = 120.0
LIVE = ("SCHEDULING", "RUNNING")


class HfBoxes:
    """The provider.   flavor: hardware of a box.   namespace: a user or an organisation; None: the token's user."""

    def __init__(self, flavor: str = FLAVOR, namespace: str | None = None) -> None:
        import huggingface_hub

        if not hasattr(huggingface_hub, "Sandbox"):
            raise InnerError("boxes on Hugging Face need huggingface_hub 2.4. `pip install -U huggingface_hub`")
        if not huggingface_hub.get_token():
            raise InnerError("boxes on Hugging Face need a token, and HF_TOKEN is not set. `hf auth login`")
        with _as_ours(ProviderFailed):
            self._namespace = namespace or str(huggingface_hub.HfApi().whoami()["name"])
            rows = huggingface_hub.HfApi().list_jobs_hardware()
        self._sdk, self._flavor = huggingface_hub, flavor
        prices = [row.unit_cost_usd * n for row in rows if row.name == flavor and (n := PER_HOUR.get(row.unit_label))]
        self.price_per_hour = prices[0] if prices else None

    def start(self, owner: BoxOwner, recipe: BoxRecipe, *, timeout_s: float) -> "HfBox":
        if recipe.offline or recipe.build:
            raise InnerError(HF_ONLINE if recipe.offline else build_fault("hf"))
        with _as_ours(ProviderFailed):
            made = self._sdk.Sandbox.create(
                recipe.image or recipe.base or IMAGE, flavor=self._flavor, namespace=self._namespace,
                labels=_labels_of(owner.labels), env={FOLDER: recipe.folder},
                idle_timeout=recipe.ttl_s, start_timeout=timeout_s,
            )  # fmt: skip
            return HfBox(self._sdk, made.id, self._namespace, recipe.folder, made)

    def find(self, labels: Mapping[str, str]) -> Sequence["HfBox"]:
        with _as_ours(ProviderFailed):
            api = self._sdk.HfApi()
            jobs = list(api.list_jobs(labels=_labels_of(labels), status=list(LIVE), namespace=self._namespace))
        return [HfBox(self._sdk, job.id, self._namespace, (job.environment or {}).get(FOLDER, "/app")) for job in jobs]


class HfBox:
    """One sandbox.   made: the SDK's object; None: connect at the first use."""

    def __init__(self, sdk: Any, id: str, namespace: str, folder: str, made: Any = None) -> None:
        self._sdk, self._id, self._namespace, self._folder, self._made = sdk, id, namespace, folder, made

    def exec(self, command: str, *, user: str, timeout_s: float) -> Ran:
        words = fitting_words([*as_user(user), *wrapped_command(command, timeout_s, self._folder)])
        with _as_ours(BoxGone):
            ran = self._connected().run(words, timeout=timeout_s + KILL_AFTER_S + ANSWER_S, check=False)
            return Ran(137 if ran.timed_out else ran.exit_code, read_output(ran.stdout))

    def read(self, path: str) -> bytes:
        with self._file_errors(FileNotFoundError, path):
            return self._connected().files.read(posixpath.join(self._folder, path))

    def write(self, path: str, data: bytes) -> None:
        with self._file_errors(FileExistsError, path):
            self._connected().files.write(posixpath.join(self._folder, path), data)

    def stop(self) -> None:
        with _as_ours(ProviderFailed):
            self._sdk.HfApi().cancel_job(job_id=self._id, namespace=self._namespace)

    def _connected(self) -> Any:
        """Return the SDK's object. A box of the list may still be starting, so it gets STARTS_S to answer."""
        end = time.monotonic() + STARTS_S
        while self._made is None:
            try:
                made = self._sdk.Sandbox.connect(self._id, namespace=self._namespace)
                made.run(["true"], timeout=ANSWER_S)
                self._made = made
            except (self._sdk.errors.SandboxError, OSError):
                if time.monotonic() > end or self._stage() not in LIVE:
                    raise
                time.sleep(1.0)
        return self._made

    @contextmanager
    def _file_errors(self, kind: type[OSError], path: str) -> Iterator[None]:
        """Raise an error as `kind` if the box runs and refuses the request; raise all other errors as BoxGone."""
        with _as_ours(BoxGone):
            try:
                yield
            except self._sdk.errors.SandboxError as error:
                if error.status_code not in (400, 403, 404, 409) or self._stage() != "RUNNING":
                    raise
                refused = kind(f"{path!r}: {error}")
            else:
                return
        raise refused

    def _stage(self) -> str:
        return str(self._sdk.HfApi().inspect_job(job_id=self._id, namespace=self._namespace).status.stage)


def _labels_of(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels in the Hub's alphabet, under other names than the labels of replicas' jobs."""
    return {**MADE_BY, **{f"box-{name}": re.sub(r"[^A-Za-z0-9_-]", "-", text)[:100] for name, text in labels.items()}}


@contextmanager
def _as_ours(kind: type[ProviderFailed] | type[BoxGone]) -> Iterator[None]:
    """Raise the SDK's errors as ours: InnerError in place of ProviderFailed for a refused token, else `kind`.

    This concerns any exception: for example, an answer that is not JSON is a ValueError."""
    try:
        yield
    except (InnerError, ProviderFailed, BoxGone):
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        if status in (401, 403) and kind is ProviderFailed:
            raise InnerError(f"Hugging Face refuses the token: {error}. Give a token that may write Jobs.") from error
        quota = "the quota of jobs is reached: " if status == 429 else ""
        raise kind(f"{quota}{type(error).__name__}: {error}") from error
