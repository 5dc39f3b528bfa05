"""Checks the URL of `--alert` before a start, and passes it to the supervisor as a secret.

    --alert URL ─▶ this environment: DILOCO_ALERT ─▶ a supervisor here, in a terminal or detached
    a supervisor on Modal or in a Hugging Face job does not get this environment: it needs a secret of the platform

The URL is written neither into the bucket nor into a log.

Not promised: that a server listens at the address; the first trouble shows it (docs/troubles.md).
"""

from collections.abc import MutableMapping, Sequence

from executors.platforms.places import Place
from executors.preflight.run_url import UsageError
from executors.supervision.notices import VARIABLE

HOSTS = {
    "modal": "put it into a Modal secret, `modal secret create diloco-alert {0}=…`: --secret diloco-alert",
    "hf-jobs": "set {0} in this shell and name it as a job's secret: --secret {0}",
}  # platforms that run a detached supervisor


def take_alert(url: str | None, places: Sequence[Place], *, detach: bool, environ: MutableMapping[str, str]) -> None:
    """Put the URL into `environ`.  Raise UsageError if the URL is not valid or would not reach the supervisor.

    The error does not contain the URL, because the URL is a secret."""
    if any(VARIABLE in place.env for place in places):
        raise UsageError(f"{VARIABLE} is among a place's env, which the bucket shows; name a secret instead: --secret")
    if not url:
        return
    from executors.supervision.notices.alerts import host_of

    try:
        host_of(url)
    except ValueError as error:
        raise UsageError(str(error)) from None
    there = {place.executor for place in places}
    name = there.pop() if len(there) == 1 else ""
    if detach and name in HOSTS and not (name == "hf-jobs" and any(VARIABLE in p.secrets for p in places)):
        way = HOSTS[name].format(VARIABLE)
        raise UsageError(f"--alert does not reach a supervisor on {name}; {way}, without --alert")
    environ[VARIABLE] = url
