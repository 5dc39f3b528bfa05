"""`diloco train CONFIG --run RUN --again`: found a run again, with the corrected file, if nothing was trained in it.

    the run has the same config  ─▶ nothing to do
    a supervisor holds the run   ─▶ refused: `diloco stop RUN` first
    stop_run, with its proof     ─▶ refused if a process may still run
    a record `Superseded`, written as commit 0  ─▶ refused if a step was committed meanwhile; else RUN/again counts

If two users do this at once, they supersede one run and found one run: run.json in RUN/again is written once.

Not promised: that costs and budget of the second run include the costs of the first.
"""

import shlex
from collections.abc import Callable

from diloco.process.processes import host_words
from diloco.run.config import AUTO, RunConfig
from diloco.run.founding import file_records, list_differences
from diloco.run.record import RunRecord, Superseded, is_superseded, url_below
from executors.preflight.run_url import UsageError
from executors.supervision.grace import GRACE_S
from executors.supervision.holder import supervisor_of
from executors.supervision.shutdown import stop_run
from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.records.records import new_nonce
from rendezvous.store import Store, put_once
from rendezvous.stores.run_key import open_signed


def found_again(config: RunConfig, url: str, clock: Clock, say: Callable[[str], None], grace_s: float = GRACE_S) -> str:
    """Return the URL at which to found the run.   url: the result of `current_url`.

    Raise UsageError if the run cannot be founded again; it is unchanged then, but `stop_run` may have ended it."""
    store = open_signed(url)
    if store.get(layout.RUN) is None or not (differs := differing_settings(config, store)):
        return url
    if store.get(layout.commit_key(0)) is not None and not is_superseded(store):
        raise UsageError(_trained_in_words(url, differs))
    if (holder := supervisor_of(store)) is not None:
        raise UsageError(
            f"{url} is supervised by process {holder.pid} on {host_words(holder.host)}, with another config "
            f"({'; '.join(differs)}). To end that run: diloco stop {shlex.quote(url)}, then this command again. "
            "To keep it: another --run"
        )
    if live := [end.name for end in stop_run(store, clock, grace_s, say) if end.live]:
        raise UsageError(
            f"{url} is not created again: {', '.join(live)} may still run. End them: diloco stop {shlex.quote(url)}"
        )
    put_once(store, clock, layout.commit_key(0), Superseded(new_nonce(), clock.wall()).encode())
    if not is_superseded(store):
        raise UsageError(_trained_in_words(url, differs))
    say(f"{url} had trained nothing, so it begins again ({'; '.join(differs)}) with its name, in {url_below(url)}")
    return url_below(url)


def _trained_in_words(url: str, differs: list[str]) -> str:
    return (
        f"{url} has taken a step with another config ({'; '.join(differs)}), so it is not created again. Use another "
        "--run, or the config that it was started with"
    )


def differing_settings(config: RunConfig, store: Store) -> list[str]:
    """Return the differences between this config and the run in the store; [] if there are none."""
    return list_differences(*both_records(config, store))


def both_records(config: RunConfig, store: Store) -> tuple[RunRecord, RunRecord]:
    """Return the record of the run in the store, and the record that this config would write."""
    stands = RunRecord.decode(store.get(layout.RUN) or b"")
    files = {setting: path.read_bytes() for setting, path in config.user_files().items()}
    mine = RunRecord(config.to_dict(), config.mathematics(), file_records(config, files), new_nonce(), 0.0)
    return stands, mine.with_codec(stands.codec) if mine.codec == AUTO else mine
