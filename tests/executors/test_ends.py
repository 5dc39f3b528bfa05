"""Why a session ended: told in status, report and logs, also of one that is dead, and of a launch that never lived."""

import io
import json
from pathlib import Path

import pytest

from diloco.runlog.reader import read_report
from diloco.runlog.scope import COSTS, STATUS
from diloco.runlog.sessions import LONGEST, joined_words, most_telling_line, observed_words, own_words
from diloco.runlog.summary import checks, headline, summary
from executors.cli.completion import slots_of
from executors.cli.looking import logs, status
from executors.cli.looking.status import Screen, status_table
from executors.platforms.base import Handle
from executors.platforms.on_host.executor import LocalProcessExecutor
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.clock import SystemClock
from rendezvous.records.records import Beat, Claim
from tests.diloco.test_report import T0, Bucket, killed_and_replaced
from tests.executors.test_cli import complaint, config, run, say  # noqa: F401

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 79 GiB of which 1 GiB is free"
TAIL = ["step 7", "Traceback (most recent call last):", '  File "x.py", line 3', OOM, "warning: leaked semaphores"]


def launched(b: Bucket, slot: str, attempt: int, at: float) -> None:
    handle = Handle("r", slot, attempt, "modal", native=f"fc-{slot}-{attempt}").to_dict()
    b.tell("supervisor", 1, at, "launched", slot=slot, attempt=attempt, executor="modal", handle=handle)


def lived(b: Bucket, slot: str, generation: int, attempt: int, at: float) -> None:
    launched(b, slot, attempt, at)
    claim = Claim(slot, generation, "n", T0 + at + 1, f"modal/{slot}.{attempt}", 77)
    b.store.create(layout.claim_key(slot, generation), claim.encode())


def lost(b: Bucket, slot: str, attempt: int, at: float, generation: int = 0, **more: object) -> None:
    who = {"generation": generation} if generation else {}
    b.tell("supervisor", 1, at, "lost", slot=slot, attempt=attempt, **who, **more)


def out_of_memory() -> Bucket:
    """r00-1 ran out of memory, r00-2 runs; the launch of r01 never claimed its slot."""
    b = Bucket(replicas=2)
    lived(b, "r00", 1, 1, 1.0)
    lost(b, "r00", 1, 20.0, generation=1, exit_code=1, reason="exit code 1", tail=TAIL)
    lived(b, "r00", 2, 2, 21.0)
    launched(b, "r01", 1, 2.0)
    lost(b, "r01", 1, 30.0, exit_code=1, reason="exit code 1", tail=["ModuleNotFoundError: No module named 'trl'"])
    b.store.put(layout.beat_key("r00"), Beat("r00", 2, 9, "train", 0, 3, 0.2, T0 + 39.9).encode())
    return b


@pytest.mark.parametrize("scope", [STATUS, COSTS])
def test_a_session_knows_why_it_ended(scope) -> None:
    sessions = {x.name: x for x in read_report(out_of_memory().store, scope).sessions}
    assert sessions["r00-1"].why == f"exit code 1; {OOM}" and sessions["r00-2"].why == ""


def test_status_shows_the_last_end_of_each_slot_with_its_reason() -> None:
    """Before: "lost at 20.0 s, counted in 0 steps", and r01 "starting", with no word of why."""
    lines = status_table(read_report(out_of_memory().store), now=T0 + 40)
    at = next(i for i, line in enumerate(lines) if "r00-1" in line)
    assert "lost at" in lines[at] and "exit code 1; torch.OutOfMemoryError: CUDA out of memory" in lines[at + 1]
    at = next(i for i, line in enumerate(lines) if line.startswith("  r01 "))
    assert "launch 1 ended before it joined" in lines[at] and "No module named 'trl'" in lines[at + 1]
    assert max(map(len, lines)) < 80


def test_a_launch_that_followed_and_lives_takes_the_failed_one_off_the_table() -> None:
    b = out_of_memory()
    lived(b, "r01", 1, 2, 35.0)
    assert "before it joined" not in "\n".join(status_table(read_report(b.store), now=T0 + 40))


def test_an_end_is_given_to_the_session_of_its_launch_where_no_generation_is_told() -> None:
    b = Bucket(replicas=1)
    lived(b, "r00", 1, 4, 1.0)
    lost(b, "r00", 4, 20.0, reason="preempted by Modal")
    (session,) = read_report(b.store).sessions
    assert (session.how, session.why) == ("lost", "preempted by Modal")


def test_a_lifes_own_last_words_are_better_than_a_line_of_its_log() -> None:
    b = out_of_memory()
    b.tell("r00", 1, 19.0, "crashed", error="RuntimeError: the reward gave NaN")
    session = read_report(b.store).sessions[0]
    assert session.why == "exit code 1; RuntimeError: the reward gave NaN" and session.how == "crashed"


def test_words_are_short_telling_and_said_once() -> None:
    assert most_telling_line(TAIL) == OOM and most_telling_line(["all", "well"]) == "" == most_telling_line("no list")
    assert most_telling_line(["2026-11-22T10:00:01.5 ValueError: x"]) == "ValueError: x"
    last = "a00: cannot create s3://b/run/rollouts/r00/1.bundle: 403 AccessDenied"
    retried = "a00: log not written: cannot write s3://b/run/log/a00-1: 503 SlowDown; trying again"
    assert most_telling_line([last, retried]) == last, "an actor that may not write cannot log its own words"
    assert observed_words({"exit_code": -9}) == "exit code -9" and observed_words({}) == ""
    assert own_words({"reason": "asked to leave"}) == "" and own_words({"text": "a\nb"}) == "a b"
    assert len(own_words({"error": "x" * 5000})) == LONGEST
    assert joined_words("", "own") == "own" and joined_words("seen; line", "") == "seen; line"


def test_a_leave_record_that_was_asked_for_needs_no_reason() -> None:
    b = killed_and_replaced()
    b.tell("r01", 2, 20.0, "left", step=6, reason="asked to leave")
    assert [x.why for x in read_report(b.store).sessions] == ["", "exit code -9", ""]


def test_the_report_shows_the_reasons_and_the_page_too(tmp_path: Path) -> None:
    from executors.cli.looking.report import write_page

    store = out_of_memory().store
    report = read_report(store)
    text = summary(report)
    assert "r00-1: exit code 1; torch.OutOfMemoryError: CUDA out of memory" in text
    assert max(map(len, text.splitlines())) <= 80
    assert "CUDA out of memory" in write_page(report, store, tmp_path, T0 + 40).read_text()


def test_programs_are_told_the_reason_too() -> None:
    told = status.status_dict(read_report(out_of_memory().store), T0 + 40)
    assert "CUDA out of memory" in told["sessions"][0]["why"] and told["sessions"][1]["why"] == ""


# -------------------------------------------------------------------- logs of a dead session


@pytest.mark.slow
def test_the_log_of_a_dead_session_on_this_machine(capsys, run, tmp_path):  # noqa: F811
    """Before: "there is no slot 'r01-1' in this run"."""
    from diloco.process.journal import Journal
    from executors.platforms.on_host.executor import make_process_folder
    from rendezvous.machine import machine_name

    stem = make_process_folder(run.url) / "r01.1"
    Path(f"{stem}.log").write_text("one\ntwo\nCUDA out of memory\n")
    handle = Handle(run.url, "r01", 1, "local", machine_name(), 4242, 1, "/etc/passwd")
    run.store.put(layout.claim_key("r01", 1), Claim("r01", 1, "n", T0, handle.host, 4242).encode())
    journal = Journal(run.store, SystemClock(), "supervisor", 1)
    journal.emit("launched", slot="r01", attempt=1, pid=4242, executor="local", handle=handle.to_dict())
    journal.flush()
    assert say(capsys, "logs", run.url, "r01-1", "--tail", "2")[1] == "two\nCUDA out of memory\n"
    assert say(capsys, "logs", run.url, "r01-1", "-f")[1] == "one\ntwo\nCUDA out of memory\n"


def test_a_dead_session_whose_log_is_nowhere_is_told_from_the_bucket(capsys, run):  # noqa: F811
    out = say(capsys, "logs", run.url, "r01-1")[1].splitlines()
    assert out[0].startswith("(r01-1: killed, exit code -9; the bucket has these lines)")
    assert [json.loads(line)["event"] for line in out[1:]] == ["joined", "step", "step"]
    assert "no session r01-7 has joined this run; there have been r00-1, r01-1, r01-2" in complaint(
        capsys, "logs", run.url, "r01-7"
    )


def test_the_log_that_another_user_keeps_is_told_from_the_bucket(capsys, run, monkeypatch):  # noqa: F811
    """Before: a bare "[Errno 13] Permission denied"."""

    def closed(*_: object) -> list[str]:
        raise PermissionError(13, "Permission denied", "r01.1.log")

    monkeypatch.setattr(logs, "_launch_of", lambda *_: object())
    monkeypatch.setattr(LocalProcessExecutor, "logs", closed)
    assert say(capsys, "logs", run.url, "r01-1")[1].startswith(
        "(r01-1: killed, exit code -9; the bucket has these lines)"
    )


def test_the_log_of_an_actors_session_is_told_too(capsys, run):  # noqa: F811
    """Before: "there is no slot 'a00-1' in this run", though TAB offers it."""
    assert "no session a00-1 has joined this run" in complaint(capsys, "logs", run.url, "a00-1")
    write_control(run.store, SystemClock(), steps=12, actors=1)
    assert "a00 has not been launched yet" in complaint(capsys, "logs", run.url, "a00")


def test_tab_offers_sessions_for_logs_and_slots_for_drain(capsys, run):  # noqa: F811
    assert slots_of(run.url) == ["r00", "r01"]
    offered = say(capsys, "completion", "bash", "--slots", run.url, "--verb", "logs")[1].split()
    assert offered == ["r00", "r01", "r00-1", "r01-1", "r01-2", "supervisor"]
    assert say(capsys, "completion", "zsh", "--slots", run.url, "--verb", "drain")[1].split() == ["r00", "r01"]


# -------------------------------------------------------------------- the headline


def test_the_headline_counts_replicas_that_were_counted_not_those_that_are_wanted() -> None:
    """Before: "9 replicas" of a run in which two ever took part."""
    b = killed_and_replaced()
    write_control(b.store, b.clock, replicas=9)
    assert "6 of 6 outer steps" in headline(read_report(b.store)) and ", 2 replicas, H = 6" in headline(
        read_report(b.store)
    )
    assert "no replica counted yet" in headline(read_report(Bucket(replicas=5).store))


def test_the_clock_of_a_stopped_run_stands() -> None:
    """Before: it counted on for as long as a viewer looked."""
    b = Bucket(steps=50)
    b.claim("r00", 1, 0.0)
    b.commit(0, 30.0, [b.offer(0, "r00", 1, 0.1)])
    b.store.put(layout.beat_key("r00"), Beat("r00", 1, 9, "train", 1, 3, 0.2, T0 + 40).encode())
    going = [status_table(read_report(b.store), now=T0 + at)[0] for at in (41, 42, 400)]
    assert [line.split("  ")[-1] for line in going] == ["41 s", "42 s", "6 min 40 s"]
    write_control(b.store, b.clock, stop=True)
    b.store.put(layout.beat_key("r00"), Beat("r00", 1, 10, "left", 1, 3, 0.2, T0 + 45).encode())
    assert {status_table(read_report(b.store), now=T0 + at)[0].split("  ")[-1] for at in (46, 500, 9000)} == {"45 s"}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", ["demo", "a-name-that-is-much-longer-than-anybody-can-read-in-one-line"])
def test_the_first_line_has_its_numbers_on_any_screen(monkeypatch, width, name) -> None:
    import os
    import shutil

    b = killed_and_replaced()
    report = read_report(b.store)
    report.name = name
    for step in report.steps:
        step.reward = dict.fromkeys(step.reward, 0.5)
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((width, 40)))
    out = io.StringIO()
    Screen(out).show(report)
    first = out.getvalue().splitlines()[0].removesuffix("\x1b[K")
    assert "outer step 6 of 6" in first and first.endswith(" 0.50  17 s") and len(first) < width
    assert all(c.ok for c in checks(report))
