"""Slot "auto": a free slot for a process that was started by hand."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.run.library import ensure_slot, first_replicas, take_free_slot, tell_first_wait
from rendezvous import layout
from rendezvous.agreement.membership import BeatStatus, claim, read_control, write_control
from rendezvous.records.records import Leave
from rendezvous.store import put_once
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import ManualClock


def join(store: MemoryStore) -> str:
    slot, generation = take_free_slot(store, ManualClock())
    ensure_slot(store, ManualClock(), slot, replicas=None, min_replicas=None, steps=None)
    assert generation >= 1
    return slot


def test_processes_without_a_supervisor_get_one_slot_each() -> None:
    store = MemoryStore()
    assert [join(store) for _ in range(3)] == ["r00", "r01", "r02"]
    wanted = read_control(store)
    assert wanted.replicas == 3 and not wanted.guests


def test_a_slot_whose_session_has_left_is_free_and_a_killed_one_is_not() -> None:
    store = MemoryStore()
    for _ in range(3):
        join(store)
    left = Leave("r01", 1, step=0, base="", reason="asked to leave", nonce="n", at=0.0)
    put_once(store, ManualClock(), layout.leave_key("r01", 1), left.encode())
    assert take_free_slot(store, ManualClock()) == ("r01", 2)
    assert take_free_slot(store, ManualClock()) == ("r03", 1)


def test_many_at_the_same_moment_get_different_slots() -> None:
    store, found = MemoryStore(), list[str]()
    threads = [
        threading.Thread(target=lambda: found.append(take_free_slot(store, ManualClock())[0])) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [layout.slot_name(i) for i in range(16)]


@pytest.mark.parametrize("started", [0, 2])
def test_a_guest_never_takes_a_slot_that_a_supervisor_keeps(started: int) -> None:
    store, clock = MemoryStore(), ManualClock()
    write_control(store, clock, replicas=2, min_replicas=1)
    claim(store, clock, layout.SUPERVISOR)
    for index in range(started):
        claim(store, clock, layout.slot_name(index))
    assert [join(store), join(store)] == ["r02", "r03"]
    wanted = read_control(store)
    assert wanted.replicas == 2 and wanted.guests == {"r02", "r03"}
    assert [slot for slot in wanted.slot_names if wanted.is_kept(slot)] == ["r00", "r01"]


def test_rows_are_shared_by_the_first_number_of_replicas(tmp_path: pytest.TempPathFactory) -> None:
    from rendezvous.stores.open import open_store

    url = f"file://{tmp_path}/run"
    assert first_replicas(url) == 0
    write_control(open_store(url), ManualClock(), replicas=3, min_replicas=1)
    write_control(open_store(url), ManualClock(), replicas=5)
    assert first_replicas(url) == 3


@pytest.mark.parametrize(("seconds", "lines"), [(5.0, 0), (60.0, 1)])
def test_a_first_step_that_stays_open_says_once_what_it_waits_for(
    seconds: float, lines: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """README's loop was started once, and printed nothing: it waited for a second process."""
    status = BeatStatus()
    begun = {3.0: ("train", 4), 5.0: ("wait", 4), 5.0 + seconds: ("train", 5), 80.0: ("wait", 5), 120.0: ("left", 5)}

    class Clock(ManualClock):
        def sleep(self, pause: float) -> None:
            super().sleep(pause)
            if (now := begun.get(self.now())) is not None:
                status.enter_phase(*now)
                status.note = "needs min_replicas=2" if now[0] == "wait" else ""

    session: Any = SimpleNamespace(rv=SimpleNamespace(name="r00-1", members=SimpleNamespace(status=status)))
    tell_first_wait(session, Clock())
    assert capsys.readouterr().err == "r00-1 waits in outer step 4: it needs min_replicas=2\n" * lines
