"""A run that a program founds by itself, with `StoreManager` and `make_diloco`, or inside a script of `diloco launch`.

    ensure_slot       the first control record, or one that has this slot
    take_free_slot    slot "auto": the first free slot; with a supervisor, a slot that it never fills
    agree_on_run      run.json by outer settings and parameters; in a launched script's run, script.json
    open_session      the session of a replica that a program starts, or that `diloco launch` started for it
    tell_first_wait   a line on stderr if the first outer step waits for other replicas
    launched_session  the session that a replica's process holds for the script which it runs
    refuse_other_run  a launched script whose StoreManager names another run
    refuse_second     a process trains in a run once: θ of a finished run would replace the second training

Not promised: that such a run can be exported; its model is in the program, unless `diloco launch` started it.
"""

import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, cast

from diloco.process.session import Session, process_fields
from diloco.run.config import OuterError
from diloco.run.founding import TRAINED, found_run, is_finished, refuse_another, refuse_headless
from diloco.run.record import RunRecord, current_url, decode_run, with_script
from rendezvous import layout
from rendezvous.agreement.membership import newest_claim, read_control, read_leave, write_control
from rendezvous.clock import Clock, SystemClock
from rendezvous.records.records import Claim, Control, decode_or_none, new_nonce
from rendezvous.store import Store, put_once
from rendezvous.stores.open import open_store
from rendezvous.stores.run_key import run_key, under_key

AUTO = "auto"  # in place of a slot: choose a free slot
LAUNCHED: dict[str, Session] = {}  # one_spelling(URL) -> the session of the process that runs a user's script for it
TELL_S, LOOK_S = 10.0, 1.0  # seconds of waiting after which the user is told; seconds between two looks
OPENED = set[str]()  # one_spelling(URL) of runs in which this process has opened a session by itself


def open_session(
    run: str | Store, slot: str, clock: Clock, desired: Mapping[str, int | None], **settings: Any
) -> Session:
    """Open the session of a program's replica, and found the run if it is new.   slot: r00, r01, … or AUTO.

    desired: replicas, min_replicas and steps of a new run.   settings: for the Session, unless `diloco launch` made it.
    """
    if isinstance(run, str) and (held := launched_session(run, slot, desired["steps"])) is not None:
        return held
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # it imports its parent's main module
        raise OuterError(
            "a worker process of `multiprocessing` runs this script from its first line, and would take this replica's "
            'slot from it. Put the lines that train below `if __name__ == "__main__":`'
        )
    refuse_other_run(run, slot)
    if not url_of(run).startswith("memory://"):  # replicas of such a run are all in this process
        refuse_second(run)
        OPENED.add(one_spelling(run))
    store = _reach(run, clock)
    slot, generation = take_free_slot(store, clock) if slot == AUTO else (slot, 0)
    ensure_slot(store, clock, slot, **desired)
    session = Session(store, slot, clock=clock, generation=generation, **settings)
    threading.Thread(target=tell_first_wait, args=(session, SystemClock()), name=f"waits-{slot}", daemon=True).start()
    return session


def tell_first_wait(session: Session, clock: Clock) -> None:
    """Print what this replica waits for if its first outer step takes long to close: you may have to start others.

    Later waits are in `diloco status`."""
    status, step, since = session.rv.members.status, -1, 0.0
    while status.phase != "left" and step in (-1, status.step):
        if status.phase == "wait" and step < 0:
            step, since = status.step, clock.now()
        if step >= 0 and clock.now() - since >= TELL_S and (why := status.note):
            print(f"{session.rv.name} waits in outer step {step}: it {why}", file=sys.stderr, flush=True)
            return
        clock.sleep(LOOK_S)


def launched_session(url: str, slot: str, steps: int | None) -> Session | None:
    """Return the session that `diloco launch` claimed for this process; None for a script that you started by hand.

    steps: outer steps that the script asks for, used if the operator has asked for no number.
    """
    session = LAUNCHED.get(one_spelling(url))
    if session is None or slot not in (AUTO, session.rv.slot):
        return None
    refuse_second(url)
    if steps is not None and not read_control(session.rv.store).steps:
        write_control(session.rv.store, session.clock, steps=steps)
    return session


def refuse_other_run(run: str | Store, slot: str) -> None:
    """Raise OuterError in a launched script that names a run or slot of its own, before it has joined the launched run.

    Else each replica would wait alone, in a run that has no other replicas."""
    for url, session in LAUNCHED.items():
        if session.rv.members.status.phase == "boot":
            raise OuterError(
                f'StoreManager has the run "{url_of(run)}" and the slot "{slot}", and `diloco launch` started this '
                f'process for {url}, slot "{session.rv.slot}". Write StoreManager(os.environ["DILOCO_RUN"], '
                'os.environ["DILOCO_SLOT"], …)'
            )


def refuse_second(run: str | Store) -> None:
    """Raise OuterError if this process has trained in the run; if you started the process, only after the run's end."""
    session = LAUNCHED.get(one_spelling(run))
    has_trained = session is not None and session.rv.members.status.phase != "boot" and not session.rv.is_leaving
    if has_trained or (one_spelling(run) in OPENED and _has_ended(run)):
        raise OuterError(
            f"this process has already trained in {url_of(run)}, and a run has one training: a second one "
            "would get the run's weights and take no step. Name another run for the second training, and let it "
            "begin with the model that this run saved"
        )


def one_spelling(run: str | Store) -> str:
    """Return the same URL for `./run`, `run/`, a link to this folder, `file:///…/run` and an open store."""
    scheme, _, path = (found := url_of(open_store(run) if isinstance(run, str) else run)).partition("://")
    return f"file://{os.path.realpath(path)}" if scheme == "file" else found


def url_of(run: str | Store) -> str:
    return run if isinstance(run, str) else run.url


def _has_ended(run: str | Store) -> bool:
    store = _reach(run, SystemClock())
    return is_finished(store, read_control(store))


def _reach(run: str | Store, clock: Clock) -> Store:
    return under_key(open_store(current_url(run)) if isinstance(run, str) else run, clock, run_key())


def ensure_slot(
    store: Store, clock: Clock, slot: str, *, replicas: int | None, min_replicas: int | None, steps: int | None
) -> None:
    """Write a new run's first control record, or a record that adds `slot` if the newest one lacks it."""
    desired = read_control(store)
    needed = layout.slot_index(slot) + 1
    if desired.records == 0:
        count = max(needed, replicas or 0)
        quorum = min_replicas if min_replicas is not None else min(2, count)
        write_control(store, clock, replicas=count, min_replicas=quorum, steps=steps)
    elif needed > desired.universe:
        write_control(store, clock, replicas=needed)


def first_replicas(url: str) -> int:
    """Return a run's first number of replicas, which decides the shares of its rows; 0 without a run."""
    record = decode_or_none(Control, _reach(url, SystemClock()).get(layout.control_key(0)))
    return record.replicas or 0 if record is not None else 0


def take_free_slot(store: Store, clock: Clock) -> tuple[str, int]:
    """Claim the first slot that has no claim or whose session has left.   Return the slot and its generation.

    In a run with a supervisor, the slot is a guest's: the supervisor never starts a replica in it.
    """
    is_supervised = store.get(layout.claim_key(layout.SUPERVISOR, 1)) is not None
    first = read_control(store).replicas if is_supervised else 0
    for slot in map(layout.slot_name, range(first, layout.MOST_SLOTS)):
        held = newest_claim(store, slot)
        if held is not None and read_leave(store, slot, held.generation) is None:
            continue
        generation = 1 if held is None else held.generation + 1
        mine = Claim(slot, generation, nonce=new_nonce(), at=clock.wall(), **process_fields())
        won, _ = put_once(store, clock, layout.claim_key(slot, generation), mine.encode())
        if won:  # else another process has claimed it at this moment
            if is_supervised:
                write_control(store, clock, guest=slot)
            return slot, generation
    raise OuterError(f"{store.url} has no free slot left. Name one in DILOCO_SLOT")


def agree_on_run(
    store: Store,
    clock: Clock,
    outer: Mapping[str, Any],
    parameters: list[list[Any]],
    *,
    frozen: str = "",
    replicas: int = 1,
) -> RunRecord:
    """Create or open a run like `open_run`, for a loop without run.toml: by outer settings and parameter layout.

    outer: the settings of the outer step.   parameters: [name, shape, dtype] in flat order.   replicas: desired ones.
    frozen: digest of the weights and buffers that are not trained, "" for none.
    Return the run's record, with the chosen codec in place of "auto".   Raises WrongRun.
    """
    from diloco.run import sizing

    count = sum(prod(shape) for _, shape, _ in parameters)
    seconds = sizing.compute_seconds(count, outer["sync_every"])
    mathematics = {"outer": dict(outer), "parameters": parameters, "frozen weights": frozen}
    mine = RunRecord({"name": "library", "outer": dict(outer)}, mathematics, {}, new_nonce(), clock.wall())
    choose = lambda: sizing.choose_codec(store, clock, count, replicas, seconds)  # noqa: E731
    if (body := store.get(layout.RUN)) is None:  # claims and control records come before run.json here
        refuse_headless(store, TRAINED)
    launched = decode_run(store.url, body) if body is not None else None
    is_script = launched is not None and "script" in launched.config
    _, stands, mine = found_run(store, clock, mine, choose, layout.SCRIPT if is_script else layout.RUN)
    refuse_another(store.url, _without_dtypes(stands), _without_dtypes(mine))
    return with_script(launched, store) if launched is not None and is_script else stands


def _without_dtypes(record: RunRecord) -> RunRecord:
    """Return the record for a comparison: θ is fp32 everywhere, and FSDP2 trains a bf16 model's weights in fp32."""
    there = record.mathematics.get("parameters")
    if not isinstance(there, list):
        return record
    parameters: list[Any] = [one[:2] if isinstance(one, list) else one for one in cast("list[Any]", there)]
    return replace(record, mathematics={**record.mathematics, "parameters": parameters})
