"""Found (create) a run in a bucket, or open the existing run.

    open_run   run.json (mathematics, digests of the user's files) · code/… · control/000000      without torch
    then       model/publish.py: θ₀, in a child process

The first writer of run.json decides.  The same command again resumes the run; other mathematics raise WrongRun.
"""

import shlex
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from diloco.run.config import AUTO, ConfigError, FleetConfig, RunConfig
from diloco.run.record import Parent, Run, RunRecord, decode_run, is_superseded, with_script
from inner.settings.task import EVAL
from rendezvous import layout
from rendezvous.agreement.chain import first_open_step, lost_record
from rendezvous.agreement.membership import Wanted, read_control, write_control
from rendezvous.clock import Clock
from rendezvous.errors import RecordsLost, StoreError, StoreRefused, WrongRun
from rendezvous.records.digests import SHA256, digest, hex_of
from rendezvous.records.records import new_nonce
from rendezvous.store import PatientStore, Readable, Store, put_once
from rendezvous.stores.open import open_store, urls_above
from rendezvous.stores.run_key import run_key, under_key

LAUNCH_PATIENCE_S = 5.0  # the user waits for an error message, so retry only briefly


def open_run(
    config: RunConfig,
    url: str,
    clock: Clock,
    *,
    replicas: int | None = None,
    steps: int | None = None,
    min_replicas: int | None = None,
    parent: Parent | None = None,
) -> Run:
    """Create the run at `url`, or resume it if it is the same.  Raises WrongRun, StoreRefused, ConfigError.

    parent: None for the parent that run.json names, if any.
    """
    fleet = replace(  # a smaller --replicas never lowers a quorum that the config names
        config.fleet,
        replicas=replicas or config.fleet.replicas,
        steps=steps or config.fleet.steps,
        min_replicas=min_replicas or config.fleet.min_replicas,
    )
    config = replace(config, fleet=fleet)  # the run's first number of replicas fixes the shares of the prompts
    raw = open_store(url)
    store = PatientStore(raw, clock, LAUNCH_PATIENCE_S)
    store.get(layout.RUN)  # with patience; the race below has little
    refuse_unfit(raw, clock)
    raw = under_key(raw, clock, run_key(), ask=store)
    store = PatientStore(raw, clock, LAUNCH_PATIENCE_S)
    files = {setting: path.read_bytes() for setting, path in config.user_files().items()}
    mine = RunRecord(
        config.to_dict(), config.mathematics(), file_records(config, files), new_nonce(), clock.wall(),
        parent=parent or Parent(),
    )  # fmt: skip
    for setting, body in files.items():
        put_once(store, clock, mine.files[setting]["key"], body)
    if store.get(layout.RUN) is None:
        refuse_headless(store, (layout.control_key(0), layout.claim_key(layout.slot_name(0), 1), *TRAINED))
    won, stands, mine = found_run(store, clock, mine, lambda: _sized_codec(config, store, clock))
    refuse_another(url, stands, mine, untouched=store.get(layout.commit_key(0)) is None)
    if parent is not None and parent != stands.parent:
        raise WrongRun(f"{url} continues from {stands.parent}, not from {parent}. Use another --run, or omit --from")
    set_desired(store, clock, fleet, counts_steps=config.script is None or steps is not None)
    return Run(url, raw, with_script(stands, store), resumed=not won)


def _sized_codec(config: RunConfig, store: Store, clock: Clock) -> tuple[str, str]:
    from diloco.run.sizing import codec_of  # imported here, because reading a run does not need its numpy

    return codec_of(config, store, clock, config.fleet.replicas)


def found_run(
    store: Store, clock: Clock, mine: RunRecord, choose: Callable[[], tuple[str, str]], key: str = layout.RUN
) -> tuple[bool, RunRecord, RunRecord]:
    """Write run.json unless it exists. Return (whether we wrote it, the valid record, our record for the comparison).

    key: run.json, or script.json if the run was launched with a script.
    codec = "auto" becomes the existing run's codec. For a new run, `choose` measures and returns a codec.
    """
    auto = mine.codec == AUTO
    if store.get(key) is None:
        if key == layout.RUN:
            refuse_nested(store.url)
        mine = mine.with_codec(*choose()) if auto else mine
    won, value = put_once(store, clock, key, mine.encode())
    stands = RunRecord.decode(value)
    return won, stands, mine.with_codec(stands.codec) if auto else mine


TRAINED = (layout.commit_key(0), layout.snapshot_key(0))


def refuse_headless(store: Store, later: Iterable[str]) -> None:
    """Raise RecordsLost if a later record exists while run.json is missing.

    later: keys of records that are written only after run.json.   Another process may be creating the run at this
    moment. That process writes run.json first, so this function reads run.json last.
    """
    stands = next((key for key in later if store.get(key) is not None), None)
    if stands is not None and store.get(layout.RUN) is None:
        raise RecordsLost(
            f"{store.url}/{layout.RUN} has vanished, though {stands} is there. A new run founded here would take the "
            "old run's claims and steps for its own, so nothing was written. Restore the object (a bucket's versions, "
            "a backup) and remove the rule that expires or deletes objects below this URL; or use another URL for a "
            "new run"
        )


def refuse_nested(url: str) -> None:
    """Raise WrongRun if `url` is inside another run, because each run would read the other's objects as its own.

    A folder or prefix above `url` that is missing or unreadable counts as a place without a run.
    """
    for above in urls_above(url):
        with suppress(StoreError, ValueError, OSError):
            store = open_store(above, make=False)
            if store.get(layout.RUN) is not None and not is_superseded(store):
                raise WrongRun(
                    f"{url} is inside the run at {above}: each would read the other's objects as its own. Use a "
                    "URL beside that run, or join it there"
                )


def solo_warning(desired: Wanted) -> str:
    """Return the warning for a run in which a single replica may take an outer step; "" for other runs."""
    if desired.min_replicas > 1:
        return ""
    alone = "it is the only one" if desired.replicas == 1 else f"{desired.replicas} are wanted, and any one is enough"
    return (
        f"min_replicas = 1: one replica alone may take an outer step ({alone}). No other replica confirms "
        "its θ, so bad memory would not be noticed; with --min-replicas 2 two replicas must agree"
    )


def refuse_unfit(store: Store, clock: Clock) -> None:
    """Raise StoreRefused, before anything is written, if the store lacks create-if-absent. Two replicas could
    commit the same step.   A bucket with a run may also lack create-if-absent, if versioning is on."""
    if getattr(store, "proven", False):
        return
    from rendezvous.stores.race import why_unfit

    reason = why_unfit(store, clock)
    if reason is not None:
        raise StoreRefused(
            f"{store.url} cannot carry a run: {reason}. Use a store that has create-if-absent; "
            f"`diloco doctor {shlex.quote(store.url)}` shows more"
        )


def refuse_lost_run(run: Run, *, records: int, head: int) -> None:
    """Raise RecordsLost if the store lost run.json or the newest known records. Call it before you report success.

    records: number of known records in control/.   head: the first step without a commit.
    """
    body = run.store.get(layout.RUN)
    if body is None or decode_run(run.url, body).nonce != run.record.nonce:
        raise lost_record(run.url, layout.RUN, head, "is gone" if body is None else "is another run's")
    seen = [layout.control_key(records - 1)] * (records > 0) + [layout.commit_key(head - 1)] * (head > 0)
    for key in seen:
        if run.store.get(key) is None:
            raise lost_record(run.url, key, head)


def set_desired(store: Store, clock: Clock, fleet: FleetConfig, *, counts_steps: bool = True) -> Wanted:
    """Write a control record with the desired fleet, unless the newest record has it and the run was not stopped.

    counts_steps: False for a launched script, which itself sets the number of outer steps."""
    stands = read_control(store)
    asked = {"replicas": fleet.replicas, "min_replicas": fleet.quorum}
    asked |= {"steps": fleet.steps} if counts_steps else {}
    news = {k: v for k, v in asked.items() if getattr(stands, k) != v or stands.records == 0}
    if not news and not stands.stop and not stands.drains:
        return stands
    if "steps" in news:
        refuse_fewer_steps(store, fleet.steps)
    elif is_finished(store, stands):
        return stands
    return write_control(store, clock, **news, resume=stands.stop or bool(stands.drains))


def is_finished(store: Readable, wanted: Wanted) -> bool:
    """Whether all wanted outer steps are committed."""
    return wanted.steps > 0 and store.get(layout.commit_key(wanted.steps - 1)) is not None


def refuse_fewer_steps(store: Store, steps: int) -> None:
    """Raise ConfigError if more than `steps` outer steps are committed."""
    if store.get(layout.commit_key(steps)) is None:
        return
    head = first_open_step(store, steps + 1)
    raise ConfigError(
        f"{head} outer steps are committed already, and steps = {steps} asks for fewer. steps counts from the start, "
        f"so write --steps {head + steps} for {steps} more"
    )


def refuse_another(url: str, stands: RunRecord, mine: RunRecord, *, untouched: bool = False) -> None:
    """Raise WrongRun with the differences if run.json describes other mathematics or other user files."""
    if differs := list_differences(stands, mine):
        kind = "script" if "script" in mine.config else "config"
        go_on = f" To continue from its weights: diloco train CONFIG --run NEW --from {shlex.quote(url)}."
        raise WrongRun(
            f"{url} holds a run with other mathematics: {'; '.join(differs)}. A run's mathematics never change; use "
            f"another --run URL for this {kind}, or the {kind} that the run was started with."
            + (go_on if kind == "config" else "")
            + (" Nothing was trained there yet: the same command with --again replaces it" if untouched else "")
        )


def list_differences(stands: RunRecord, mine: RunRecord) -> list[str]:
    differs = sorted(_differing_keys(stands.mathematics, mine.mathematics))
    for setting in sorted(set(stands.files) | set(mine.files)):
        there, here = (r.files.get(setting, {}).get("digest", "none") for r in (stands, mine))
        if there != here:
            there, here = (hex_of(d)[:8] or d for d in (there, here))
            name = _name_of_data(setting, stands, mine)
            differs.append(f"{setting} file (digest {there} there, {here} here{name})")
    return differs


def _name_of_data(setting: str, stands: RunRecord, mine: RunRecord) -> str:
    """Return a dataset's name in run.json, with its commit, as the same name may now mean another commit; or ""."""
    there, here = (_spelling(record, setting) for record in (stands, mine))
    return "" if there == here or "hub:" not in f"{there}" else f"; the run has {there!r}"


def _spelling(record: RunRecord, setting: str) -> Any:
    """Return the run's setting for its training or [eval] prompts; None for other files."""
    if setting == EVAL:
        return record.config.get("eval", {}).get("prompts")
    return record.config.get("inner", {}).get("data", {}).get(setting)


def refuse_layout(stands: list[list[Any]], mine: list[list[Any]]) -> None:
    """Raise WrongRun if the run's layout and ours differ.   stands, mine: [name, shape, dtype] in flat order."""
    for at in range(max(len(stands), len(mine))):
        there, here = ([*parameters[at : at + 1], ["nothing", []]][0][:2] for parameters in (stands, mine))
        if there != here:
            raise WrongRun(
                f"this replica's model has another parameter layout than the run: parameter {at} is {here[0]} "
                f"{here[1]} here, {there[0]} {there[1]} in the run. Use the releases of torch and transformers that "
                "the run was started with"
            )


def _differing_keys(there: Mapping[str, Any], here: Mapping[str, Any], prefix: str = "") -> list[str]:
    found: list[str] = []
    for key in sorted({*there, *here}):
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found += _differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            theirs, ours = ("not set" if one is None else repr(one) for one in (a, b))
            found.append(f"{prefix}{key} is {theirs} there, {ours} here")
    return found


def file_records(config: RunConfig, files: Mapping[str, bytes]) -> dict[str, dict[str, str]]:
    paths = config.user_files()
    digests = {setting: digest(body, SHA256) for setting, body in files.items()}
    return {s: {"key": layout.code_key(hex_of(d), paths[s].name), "digest": d} for s, d in digests.items()}
