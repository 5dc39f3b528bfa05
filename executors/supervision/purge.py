"""Removes the objects that platforms keep for an ended run (`diloco stop RUN --purge`).

    `stop` has proved that no process runs ──▶ control: places, former ──▶ each executor's purge ──▶ descriptions

On Modal these are the app (which costs nothing and has no containers) and the register of launches.  The run itself
(models, commits and logs) is never changed: it stays at the URL of --run, even if that is on Modal.

Not promised: the removal of images, secrets and weights, which other runs may use.
"""

from executors.platforms.places import build_executor
from rendezvous.agreement.salvage import read_standing_wishes
from rendezvous.store import Store


def purge_run(store: Store) -> list[str]:
    """Purge a run without live processes; return sentences.  Raise ExecutorError if a platform cannot be asked."""
    wanted, _ = read_standing_wishes(store)
    executor = build_executor(wanted.places, wanted.former)
    try:
        removed = executor.purge(store.url)
    finally:
        executor.close()
    return [*(removed or ["no platform keeps anything of this run"]), where_run_stays(store.url)]


def where_run_stays(url: str) -> str:
    """Return a sentence that says where the run is stored, and how to delete it there."""
    scheme, _, rest = url.partition("://")
    if scheme == "modal":
        name = rest.partition("/")[0]
        return (
            f"the run itself stays, in Modal's Dict and Volume {name!r}: `modal dict delete {name}` and `modal volume "
            f"delete {name}` end it, with every other run below modal://{name}"
        )
    return f"the run itself stays in {url}"
