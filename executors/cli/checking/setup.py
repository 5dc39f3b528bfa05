"""`diloco setup modal` and `diloco setup hf`: check an account, and print the command that starts a run.

    login ──▶ store ──▶ secret, or keys ──▶ the command to type
      └─ each step: "ok"; or setup makes the missing thing, if you agree; or advice, after which you run setup again

The first step that is not ok ends the setup, because the later steps need it.

Not promised: that your account may rent GPUs, which needs a plan or credits.  Only a launch shows it, and setup
launches nothing.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from executors.cli.opening import notice_of_silence
from executors.platforms.base import ExecutorError
from executors.platforms.on_hf_jobs.client import Hub
from executors.platforms.on_modal import client as modal_sdk
from rendezvous.clock import Clock
from rendezvous.engine.probe import probe_store
from rendezvous.errors import RendezvousError
from rendezvous.stores.open import open_store

SMALL = 1 << 20  # bytes of the blob that the check of the store writes
CREDENTIALS = {  # URL scheme of a store -> environment variables that a replica needs to reach the store
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY",),
    "az": ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY"),
    "hf": ("HF_TOKEN", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"),
}
ALSO = ("AWS_REGION", "AWS_ENDPOINT_URL", "AWS_SESSION_TOKEN", "HF_S3_ENDPOINT")  # added to a secret if they are set
KEYS_PAGE = "https://huggingface.co/settings/tokens: your token's menu, Generate S3 credentials; then export both"


@dataclass(frozen=True)
class SetupStep:
    """One requirement of a run.   todo: the user's next action; "" if the requirement is met."""

    name: str
    seen: str
    todo: str = ""

    @property
    def line(self) -> str:
        return f"  {self.name:<8} {'ok   ' if not self.todo else 'NO   '} {self.seen}"


Ask = Callable[[str], bool]  # asks the user whether to make something


def setup(place: str, url: str, secret: str, clock: Clock, ask: Ask, environ: Mapping[str, str]) -> Iterator[SetupStep]:
    """Yield the steps, up to the first step that has a todo."""
    steps = _modal_steps(url, secret, clock, ask, environ) if place == "modal" else _hf_steps(url, clock, ask, environ)
    for step in steps:
        yield step
        if step.todo:
            return


def next_command(place: str, url: str, secret: str) -> str:
    """Return the command to type next.  That run is small: a model of 0.1 M parameters, 12 outer steps."""
    if place == "modal":
        secrets = "" if url.startswith("modal://") else f" --secret {secret}"
        return (
            f"diloco train examples/modal_grpo.toml --run {shlex.quote(url)} --executor modal --gpu T4{secrets} "
            "--max-usd 2 --detach"
        )
    secrets = "".join(f" --secret {name}" for name in CREDENTIALS.get(_scheme_of(url), ()))
    return (
        f"diloco train examples/hf_jobs_grpo.toml --run {shlex.quote(url)} --executor hf-jobs --gpu t4-small{secrets} "
        "--max-usd 2 --detach"
    )


# ---------------------------------------------------------------------- Modal


def _modal_steps(url: str, secret: str, clock: Clock, ask: Ask, environ: Mapping[str, str]) -> Iterator[SetupStep]:
    with notice_of_silence("Modal"):
        login = _tried_step("login", "Modal accepts your token", _modal_login)
    yield login
    yield _store_step(url, clock)
    if not url.startswith("modal://"):
        good = f"{secret!r} holds the store's keys"
        yield _tried_step("secret", good, lambda: _modal_secret(url, secret, ask, environ))


def _modal_login() -> None:
    with modal_sdk.translated_errors("check the login"):
        modal_sdk.sdk().Client.from_env().hello()


def _modal_secret(url: str, name: str, ask: Ask, environ: Mapping[str, str]) -> None:
    """Check that the secret exists, or make it from this shell's variables."""
    try:
        modal_sdk.check_secret(name, url)
        return
    except ExecutorError:
        values = _store_values(url, environ)
        if not values or not ask(f"make the Modal secret {name!r} of {', '.join(values)} in this shell's environment?"):
            raise
    with modal_sdk.translated_errors("make the secret"):
        modal_sdk.sdk().Secret.objects.create(name, values)


# ---------------------------------------------------------------------- Hugging Face


def _hf_steps(url: str, clock: Clock, ask: Ask, environ: Mapping[str, str]) -> Iterator[SetupStep]:
    hub = Hub("", clock)
    yield _tried_step("login", "the Hub accepts your token", lambda: hub.namespace)
    if _scheme_of(url) == "hf":
        bucket = "/".join(url.removeprefix("hf://buckets/").split("/")[:2])
        yield _tried_step("bucket", bucket, lambda: _hf_bucket(hub, bucket, ask))
    if missing := [n for n in CREDENTIALS.get(_scheme_of(url), ()) if n not in environ and n != "HF_TOKEN"]:
        where = KEYS_PAGE if _scheme_of(url) == "hf" else "export them"
        yield SetupStep("keys", f"this shell does not set {', '.join(missing)}", where)
        return
    yield SetupStep("keys", "set in this shell; jobs get them as secrets, and in no other way")
    yield _store_step(url, clock)


def _hf_bucket(hub: Hub, bucket: str, ask: Ask) -> None:
    """Check that the bucket exists, or make a private one."""
    try:
        hub.patient("look at the bucket", lambda: hub.api.bucket_info(bucket))
    except ExecutorError:
        if not ask(f"make the private bucket {bucket}?"):
            raise
        hub.patient("make the bucket", lambda: hub.api.create_bucket(bucket, private=True, exist_ok=True))


def default_url(place: str, clock: Clock) -> str:
    """Return the URL of a first run without --run."""
    if place == "modal":
        return "modal://diloco/first"
    with notice_of_silence("the Hub"):
        return f"hf://buckets/{Hub('', clock).namespace}/diloco/first"


# ---------------------------------------------------------------------- both


def _store_step(url: str, clock: Clock) -> SetupStep:
    """Check from this machine whether the store can carry a run."""
    try:
        reason = probe_store(open_store(url), clock, SMALL).why_unfit()
    except (RendezvousError, ValueError, ImportError) as error:
        return SetupStep("store", f"{url}: {error}", "correct that; `diloco doctor URL` shows more")
    if reason:
        return SetupStep("store", f"{url} cannot carry a run: {reason}", "take another store with --run")
    return SetupStep("store", f"{url} keeps the first write to a key, and all readers get that write")


def _tried_step(name: str, good: str, request: Callable[[], Any]) -> SetupStep:
    try:
        request()
    except ExecutorError as error:
        return SetupStep(name, str(error), "correct that, then run the same command again")
    return SetupStep(name, good)


def _store_values(url: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the store's credentials and address from this shell's variables; {} unless all credentials are set."""
    needed = [name for name in CREDENTIALS.get(_scheme_of(url), ()) if name != "HF_TOKEN"]
    if not all(environ.get(name) for name in needed):
        return {}
    return {name: environ[name] for name in (*needed, "HF_TOKEN", *ALSO) if environ.get(name)}


def _scheme_of(url: str) -> str:
    return url.partition("://")[0]
