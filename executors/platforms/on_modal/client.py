"""Modal's client, and a translation of its errors into ours.

    AuthError, PermissionDenied ─▶ Refused: `modal token new`
    NotFoundError of a secret   ─▶ `modal secret create NAME …`
    ImageBuildError             ─▶ the build's last lines
    no answer                   ─▶ repeated for 10 s, then Unavailable: the request may work later

Only this module imports the client, and only when a caller needs the client.

Not promised: the texts of Modal's errors.  These texts change without notice, so no decision depends on them.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, TypeVar

from executors.platforms.base import ExecutorError, Refused, Unavailable
from inner.network import PROXIES, network_words
from rendezvous.clock import Clock

TAIL = 12
LIST_S = 60.0
PATIENCE_S = 10.0  # seconds of retries while Modal does not answer; Modal's client itself retries for about a second
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 4.0
T = TypeVar("T")
SECRET_KEYS = {
    "s3": "AWS_ACCESS_KEY_ID=… AWS_SECRET_ACCESS_KEY=… AWS_REGION=…",
    "gs": "GOOGLE_SERVICE_ACCOUNT_KEY=…",
    "az": "AZURE_STORAGE_ACCOUNT_NAME=… AZURE_STORAGE_ACCOUNT_KEY=…",
    "hf": "HF_TOKEN=…",
}


def sdk() -> Any:
    """Import and return the modal module."""
    try:
        import modal
        import modal.config
        import modal.exception
    except ImportError as error:
        raise ExecutorError(
            f"Modal's client is not installed ({error}): pip install 'serverless-diloco[serverless]'"
        ) from None
    return modal


def inside_container() -> bool:
    """Whether this process runs in a Modal container (in a child process there, `modal.is_local()` is wrongly True)."""
    return os.environ.get("MODAL_IS_REMOTE") == "1"


@contextmanager
def translated_errors(request: str) -> Iterator[None]:
    """Replace Modal's errors by ours, which say what happened and what to do.   request: "stop the run's app", …"""
    e = sdk().exception
    try:
        yield
    except (e.AuthError, e.PermissionDeniedError) as error:
        raise access_denied_error(error) from None
    except e.ImageBuildError as error:
        raise ExecutorError("\n".join(_why_build_failed(error))) from None
    except Exception as error:
        if no_answer(error):
            raise Unavailable(
                f"Modal did not answer the request to {request} ({network_words(error)}{_of_proxies()}). Try again"
            ) from None
        if isinstance(error, e.Error):
            raise ExecutorError(f"Modal refused the request to {request}: {error}. Correct it, and try again") from None
        raise


def _of_proxies() -> str:
    """Return advice if there is a proxy, and Modal's client lacks the package with which it uses proxies."""
    if not any(os.environ.get(name) for name in PROXIES) or find_spec("python_socks"):
        return ""
    return ". Modal's client uses a proxy only with pip install 'modal[api-proxy-support]'"


def ask_patiently(act: Callable[[], T], clock: Clock) -> T:
    """Return the value of `act`, which is repeated for PATIENCE_S while Modal does not answer.

    act: must tolerate repetition, because the answer of a completed request may be lost.
    """
    until = clock.now() + PATIENCE_S
    pause = FIRST_PAUSE_S
    while True:
        try:
            return act()
        except Exception as error:
            if is_access_denied(error) or not no_answer(error) or clock.now() >= until:
                raise
        clock.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_S)


def is_access_denied(error: BaseException) -> bool:
    """Whether Modal denies access."""
    return isinstance(error, (sdk().exception.AuthError, sdk().exception.PermissionDeniedError))


def access_denied_error(error: BaseException) -> Refused:
    first = str(error).partition(". ")[0]
    return Refused(
        f"Modal does not know who you are ({first}). Run `modal token new`, or set MODAL_TOKEN_ID and "
        "MODAL_TOKEN_SECRET"
    )


def no_answer(error: BaseException) -> bool:
    """Whether an error says nothing about the request: Modal or the network failed, or Modal denies access."""
    e = sdk().exception
    service = (e.ServiceError, e.ConnectionError, e.InternalError, e.ResourceExhaustedError, e.AuthError)
    if isinstance(error, OSError):
        return not isinstance(error, TimeoutError | FileNotFoundError | PermissionError)  # errors of the call itself
    kinds = (*service, e.ClientClosed, e.PermissionDeniedError)
    return isinstance(error, kinds) or type(error).__module__.startswith("grpclib")


def check_account(secrets: Iterable[str], run: str) -> None:
    """Check the token, the configured Modal environment, and each secret in it.  Raises ExecutorError."""
    with translated_errors("check this account"):
        environment = sdk().config.config["environment"] or ""
        try:
            if environment:
                sdk().Environment.from_name(environment).hydrate()
            else:
                sdk().Client.from_env().hello()
        except sdk().exception.NotFoundError:
            raise ExecutorError(
                f"Modal has no environment {environment!r} (MODAL_ENVIRONMENT, or the profile's). `modal environment "
                "list` lists the existing ones"
            ) from None
        for name in secrets:
            check_secret(name, run)


def check_secret(name: str, run: str) -> str:
    """Return the secret's id.  Raise ExecutorError if the workspace has no secret of that name."""
    try:
        return sdk().Secret.from_name(name).hydrate().object_id
    except sdk().exception.NotFoundError:
        raise ExecutorError(f"Modal has no secret called {name!r}. Make it with {how_to_create(name, run)}") from None


def live_apps() -> list[str]:
    """Return the names of the apps that are not stopped, from `modal app list`: the client has no list of apps."""
    command = [sys.executable, "-P", "-m", "modal", "app", "list", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIST_S)
    if done.returncode:
        last = (done.stderr or done.stdout).strip()[-300:]
        raise ExecutorError(f"`modal app list` failed ({last}), so the apps are unknown. Try it in this shell")
    return [str(app["description"]) for app in json.loads(done.stdout) if app["state"] != "stopped"]


def stop_app(name: str, clock: Clock) -> bool:
    """Stop an app and all its calls; return whether it exists."""
    with suppress(sdk().exception.NotFoundError):
        ask_patiently(lambda: sdk().App.lookup(name).stop(), clock)
        return True
    return False


def volume_id(name: str) -> str:
    """Return the id of the volume `name`; make the volume if it does not exist."""
    return sdk().Volume.from_name(name, create_if_missing=True, version=2).hydrate().object_id


def how_to_create(secret: str, run: str) -> str:
    return f"`modal secret create {shlex.quote(secret)} {SECRET_KEYS.get(run.partition('://')[0], 'KEY=VALUE')}`"


def _why_build_failed(error: Any) -> list[str]:
    lines = list[str]()
    with suppress(Exception):  # the logs are optional: the error is raised anyway
        entries = sdk().Image.from_id(error.image_id).logs.tail(TAIL)
        lines += "".join([str(entry.message) for entry in entries]).splitlines()
    last = [f"    {line}" for line in lines[-TAIL:]] or [f"    {error}"]
    return ["Modal could not build the image. Its last lines:", *last, f"All: `modal image logs {error.image_id}`"]
