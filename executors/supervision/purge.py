"""Removes what platforms keep of a run that has ended (`diloco stop RUN --purge`).

    no process runs, proven by `stop` ──▶ control: places, former ──▶ each executor's own purge ──▶ what was removed

On Modal that is the app (it costs nothing, and its containers are gone) and the register of launches.  The run itself,
which is its models, commits and logs, is never touched: it lies where --run says, also when that is on Modal.

Not promised: images, secrets and weights that other runs may use; they stay.
"""

from executors.platforms.multi import build_executor
from rendezvous.agreement.salvage import read_standing_wishes
from rendezvous.store import Store


def purge_run(store: Store) -> list[str]:
    """Purge a run without live processes; -> sentences.  Raises ExecutorError if a platform cannot be asked."""
    wanted, _ = read_standing_wishes(store)
    executor = build_executor(wanted.places, wanted.former)
    try:
        removed = executor.purge(store.url)
    finally:
        executor.close()
    return [*(removed or ["no platform keeps anything of this run"]), where_run_stays(store.url)]


def where_run_stays(url: str) -> str:
    """A sentence: the place where the run still is, and how to end that too."""
    scheme, _, rest = url.partition("://")
    if scheme == "modal":
        name = rest.partition("/")[0]
        return (
            f"the run itself stays, in Modal's Dict and Volume {name!r}: `modal dict delete {name}` and `modal volume "
            f"delete {name}` end it, with every other run below modal://{name}"
        )
    return f"the run itself stays in {url}"
