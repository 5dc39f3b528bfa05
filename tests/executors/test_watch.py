"""The live view, from hand-written buckets."""

import io
import os
import shutil

import pytest

from diloco.runlog.reader import Reader, read_report
from diloco.runlog.scope import STATUS
from diloco.views.overview import OLD_SESSIONS
from executors.cli.looking import status
from executors.cli.looking.lines import Lines, key_values, step_fields, view_for
from executors.cli.looking.status import Screen, status_table
from executors.cli.starting.demo import extra_checks, is_kill_due, next_commands
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.records.records import Beat
from tests.diloco.test_report import T0, Bucket, killed_and_replaced


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


def test_not_a_terminal_gets_one_line_per_step_and_event_each_once():
    b, out = Bucket(), io.StringIO()
    view, reader = view_for(out), Reader(b.store)
    assert isinstance(view, Lines)
    b.claim("r00", 1, 0.5)
    b.tell("r00", 1, 1.0, "joined", step=0)
    b.tell("r00", 1, 1.1, "claimed", pid=1)  # of no interest
    view.show(reader.refresh())
    for t in range(3):
        b.commit(t, 2.0 + t, [b.offer(t, "r00", 1, 0.25 * t)])
        view.show(reader.refresh())
        view.show(reader.refresh())
    lines = out.getvalue().splitlines()
    assert [line.split("=")[0] for line in lines] == ["event", "step", "step", "step"]
    assert fields(lines[0]) == {"event": "joined", "at": "0.5", "slot": "r00", "generation": "1", "step": "0"}
    expected = {"step": "2", "of": "6", "at": "3.5", "mean_reward": "0.5", "r00": "0.5", "fresh": "r00", "by": "r00-1"}
    assert fields(lines[3]) == expected


def test_what_was_before_it_began_is_one_line_and_every_step_since_has_its_numbers():
    b, out = Bucket(steps=80, replicas=1), io.StringIO()
    b.claim("r00", 1, 0.5)
    b.tell("r00", 1, 0.6, "joined", step=0)
    for t in range(50):
        b.commit(t, 1.0 + t, [b.offer(t, "r00", 1, 0.01 * t)])
    b.tell("supervisor", 1, 51.5, "stopped", code=4, text="interrupted")
    b.tell("supervisor", 2, 60.0, "started")
    view, reader = view_for(out), Reader(b.store, STATUS)
    view.show(reader.refresh())
    first = out.getvalue().splitlines()
    assert first[0] == "steps_before=50 of=80 first_reward=0.0 newest_reward=0.49"
    assert [fields(line)["event"] for line in first[1:]] == ["started"]
    for t in range(50, 80):
        b.commit(t, 61.0 + t, [b.offer(t, "r00", 1, 0.01 * t)])
    view.show(reader.refresh())
    lines = out.getvalue().splitlines()[len(first) :]
    assert [fields(line)["step"] for line in lines] == [str(t) for t in range(50, 80)]
    assert all("mean_reward" in fields(line) for line in lines)


def test_a_step_line_says_what_was_counted_later():
    out = io.StringIO()
    Lines(out).show(read_report(killed_and_replaced().store))
    (line,) = [x for x in out.getvalue().splitlines() if x.startswith("step=3")]
    assert fields(line)["late"] == "r01@2" and fields(line)["fresh"] == "r00"


def test_lines_are_in_the_order_of_time():
    out = io.StringIO()
    Lines(out).show(read_report(killed_and_replaced().store))
    times = [float(fields(line)["at"]) for line in out.getvalue().splitlines()]
    assert times == sorted(times) and "event=killed" in out.getvalue()


def test_values_with_spaces_are_quoted():
    told = key_values({"why": 'killed by "SIGKILL"', "n": 3, "none": ""})
    assert told == """why="killed by 'SIGKILL'" n=3 none="" """.strip()


def test_the_table_shows_sessions_and_who_was_lost():
    text = "\n".join(status_table(read_report(killed_and_replaced().store), now=T0 + 16.1))
    assert "outer step 6 of 6" in text and "reward 0.1" in text
    assert "r01-1     killed at 9.1 s" in text
    assert "r01-2     train      5    3/6   1.000        2  0.1 s" in text


def beating(b: Bucket, slot: str, at: float, phase: str = "wait", note: str = "") -> None:
    b.store.put(layout.beat_key(slot), Beat(slot, 1, 1, phase, 0, 0, 0.0, T0 + at, note=note).encode())


def test_the_table_says_what_is_waited_for_who_is_silent_and_what_is_wrong():
    b = Bucket(replicas=3)
    for slot in ("r00", "r01"):
        b.claim(slot, 1, 0.1)
    beating(b, "r00", 60.0, note="has offers of ['r00'], needs min_replicas=2; r01 silent for 30 s at step 0")
    beating(b, "r01", 30.0, phase="train")
    b.tell("r00", 1, 59.0, "nothing_learned", steps=3, cause="all rewards are equal")
    text = "\n".join(status_table(read_report(b.store), now=T0 + 60.5))
    assert "r00: has offers of ['r00'], needs min_replicas=2" in text
    assert "r01-1     silent" in text and "30.5 s" in text
    assert "r02       not started" in text, "no supervisor starts it"
    assert "! r00-1: nothing learned: all rewards are equal" in text


def test_a_stop_is_shown():
    b = Bucket()
    write_control(b.store, b.clock, stop=True)
    assert any("has asked this run to end" in line for line in status_table(read_report(b.store)))


def test_many_sessions_do_not_flood_the_table():
    b = Bucket(replicas=1)
    for generation in range(1, 30):
        b.claim("r00", generation, generation)
    sessions = [line for line in status_table(read_report(b.store)) if line.startswith("  r00-")]
    assert len(sessions) == 1 + OLD_SESSIONS and "r00-29" in sessions[-1]


def test_the_screen_draws_over_itself_and_fits(monkeypatch):
    monkeypatch.setattr(shutil, "get_terminal_size", lambda *_, **__: os.terminal_size((40, 6)))
    out, report = io.StringIO(), read_report(killed_and_replaced().store)
    screen = Screen(out)
    screen.show(report)
    screen.say("asking the replicas to leave")
    screen.show(report)
    first, second = out.getvalue().split("\x1b[J")[:2]
    lines = first.replace("\x1b[K", "").splitlines()
    assert len(lines) <= 5 and max(map(len, lines)) < 40
    whole = " ".join(status.status_table(read_report(killed_and_replaced().store), width=40)).split()
    assert set(first.replace("\x1b[K", "").split()) <= set(whole), "no number is cut; before, 0.51 could read 0.5"
    assert second.startswith(f"\x1b[{len(lines)}F") and "! asking the replicas" in second


def test_status_is_plain_json():
    told = status.status_dict(read_report(killed_and_replaced().store), now=T0 + 16.5)
    assert told["outer_step"] == 6 and told["done"] and told["mean_reward"] == pytest.approx(0.925)
    assert told["sessions"][2]["phase"] == "train" and told["sessions"][2]["beat_age_s"] == 0.5


# -------------------------------------------------------------------- the demo's own words


def test_the_demo_kills_in_the_middle_of_step_4_or_later():
    report = read_report(killed_and_replaced().store)  # H = 6

    def at(step: int, inner: int, phase: str = "train") -> bool:
        return is_kill_due(Beat("r01", 1, 1, phase, step, inner, 0.1, T0), report)

    assert at(4, 1) and at(4, 3) and at(7, 2)
    assert not (at(3, 3) or at(4, 0) or at(4, 4) or at(4, 3, "wait"))


def test_the_demo_tells_honestly_whether_somebody_was_killed_and_replaced():
    good = extra_checks(read_report(killed_and_replaced().store))
    assert [c.ok for c in good] == [True, True]
    assert "r01-1 killed in outer step 2, r01-2 trains 3.3 s later" in good[0].text
    nobody = extra_checks(read_report(Bucket().store))
    assert [c.ok for c in nobody] == [False, False] and "no replica was killed" in nobody[0].text


def test_the_demo_names_the_next_commands(tmp_path):
    assert f"diloco export {tmp_path} --to {tmp_path}-model" in next_commands(tmp_path)


def test_a_share_of_broken_rewards_that_is_zero_fills_no_line():
    b = Bucket(steps=4, replicas=1)
    b.claim("r00", 1, 0.1)
    for t in range(2):
        b.commit(t, 2.0 + t, [b.offer(t, "r00", 1, 0.1)])
        b.tell("r00", 1, 2.1 + t, "step", step=t, h=6, reward_broken=0.1 * t)
    report = read_report(b.store)
    assert "reward_broken" not in step_fields(report.steps[0], report)
    assert step_fields(report.steps[1], report)["reward_broken"] == 0.1
