"""`diloco watch` in a terminal that textual's Pilot plays, and where there is none."""

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from diloco.run.config import ConfigError
from diloco.run.record import Run, RunRecord
from diloco.runlog.opening import View, open_view
from diloco.runlog.reader import read_report
from diloco.runlog.scope import COSTS
from diloco.views.overview import OLD_SESSIONS, MetricCurve, SessionRow, overview
from diloco.views.troubles import find_troubles
from executors.cli import main as cli
from executors.cli.looking.lines import key_values
from executors.cli.watch import windows, words
from executors.cli.watch.app import WatchApp
from executors.cli.watch.looks import Picture, RunLooks, with_beats_as_read
from executors.cli.watch.run import check_textual, write_lines
from executors.cli.watch.windows import AskWindow, NumberWindow, TextWindow
from executors.supervision.money.bills import costs
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.errors import StoreUnclear
from rendezvous.stores.files import FileStore
from tests.diloco.test_report import T0, Bucket, FixedClock, killed_and_replaced
from tests.support.fakes import Fault, FaultyStore
from tests.support.long_run import STEP_S, LongRun, copied, long_run
from tests.support.s3_server import S3Server
from tests.support.terminal import Terminal

ROOT = Path(__file__).parents[2]


class FarStore(FaultyStore):
    cheap = False


def looks_at(run: Bucket, now: float = 1e6, faults: list[Fault] | None = None) -> RunLooks:
    store = FarStore(run.store, faults or [])
    store.url = "s3://bucket/run"
    record = RunRecord.decode(run.store.get(layout.RUN) or b"")
    return RunLooks(View(Run(store.url, store, record), None), FixedClock(T0 + now))


def whole(looks: RunLooks) -> Picture:
    looks.next_picture()
    picture = looks.next_picture()
    assert picture is not None and not picture.partial
    return picture


def play(
    looks: RunLooks,
    size: tuple[int, int],
    script: Callable[[WatchApp, "object"], Awaitable[None]],
    picture: Picture | None = None,
) -> None:
    """The app at this size shows the picture; then the script has it."""

    async def run() -> None:
        app = WatchApp(looks, reads=False)
        async with app.run_test(size=size) as pilot:
            app.show(picture)
            await pilot.pause()
            await script(app, pilot)

    asyncio.run(run())


def screen(app: WatchApp) -> list[str]:
    """The characters on the terminal, line by line."""
    return ["".join(segment.text for segment in strip) for strip in strips(app)]


def strips(app: WatchApp) -> list[Any]:
    return app.screen._compositor.render_strips()


@pytest.fixture(scope="module")
def mine() -> LongRun:
    """60 outer steps of three replicas, one of them preempted and replaced.  Read only."""
    return long_run(60, 3)


# -------------------------------------------------------------------- the picture


@pytest.mark.parametrize("size", [(80, 24), (160, 50)])
def test_the_picture_has_header_sessions_curves_and_events_at_both_widths(mine, size) -> None:
    looks = looks_at(mine, 60 * STEP_S + 5)

    async def script(app, pilot) -> None:
        text = screen(app)
        assert len(text) == size[1] and all(len(line) <= size[0] for line in text)
        assert text[0].startswith("long · outer step 60 of 61 · ETA 25 s · 30 s per step")
        assert "of $50.00" in text[1] and "$11.85/h" in text[1] and "snapshot 0" in text[1]
        assert text[2].startswith("3 train · supervised by pid 1 on host · read 0 s ago")
        names = [line.split()[0] for line in text[4:8]]
        assert names == ["r00-1", "r01-1", "r01-2", "r02-1"]
        assert text[4].split()[1:3] == ["modal", "train"] and " 3/6 " in text[4] and "   3 s" in text[4]
        assert "lost: preempted" in text[5]
        body = "\n".join(text)
        assert "› reward" in body and "▁" in body and "reward by outer step, 0 to 59" in body
        assert "its supervisor starts it again" in body and text[-1].strip().startswith("l log")

    play(looks, size, script, whole(looks))


def test_sixty_four_replicas_are_a_row_each_and_the_chosen_one_stays_in_sight() -> None:
    run = long_run(12, 64)
    looks = looks_at(run, 12 * STEP_S + 5)

    async def script(app, pilot) -> None:
        await pilot.press("end")
        await pilot.pause()
        assert app.chosen == "r63-1" and any(line.startswith("r63-1") for line in screen(app))
        app.show(looks.next_picture())
        assert app.chosen == "r63-1"
        assert any("r00 … r63 (64 of them) launched" in line for line in words.event_lines(looks.report))

    play(looks, (80, 24), script, whole(looks))


def test_the_first_look_may_begin_before_the_terminal_is_there_and_may_fail(mine) -> None:
    looks = looks_at(mine, 60 * STEP_S + 5)
    looks.begin()
    first = looks.next_picture()
    assert first is not None and first.partial and first.seen.step == 60
    looks = looks_at(mine, 60 * STEP_S + 5, [Fault("get", layout.commit_key(59), error=StoreUnclear("503"), times=9)])
    looks.begin()
    with pytest.raises(StoreUnclear):
        looks.next_picture()
    looks.run.store.faults.clear()
    again = looks.next_picture()
    assert again is not None and again.seen.step == 60


def test_m_chooses_the_next_curve_and_a_shows_every_session(mine) -> None:
    b = Bucket(replicas=1)
    for generation in range(1, 9):
        b.claim("r00", generation, generation)
    looks = looks_at(b, 10)

    async def many(app, pilot) -> None:
        assert len(app.panes._drawn) == 1 + OLD_SESSIONS
        await pilot.press("a")
        assert len(app.panes._drawn) == 8

    play(looks, (80, 24), many, whole(looks))
    looks = looks_at(mine, 60 * STEP_S + 5)

    async def next_metric(app, pilot) -> None:
        await pilot.press("m", "m")
        await pilot.pause()
        assert "KL by outer step" in "\n".join(screen(app))

    play(looks, (80, 24), next_metric, whole(looks))


def test_ages_grow_without_a_look_and_a_failed_one_says_since_when(mine) -> None:
    looks = looks_at(mine, 60 * STEP_S + 5)

    async def script(app, pilot) -> None:
        looks.clock.at += 42
        app.show(None, "503 SlowDown")
        await pilot.pause()
        text = screen(app)
        assert any(line.startswith("! 503 SlowDown") for line in text[10:]), "in full above the events"
        assert text[2].startswith("! stale: nothing new for 42 s; 503 SlowDown")
        assert "~45 s" in text[4] and "train" in text[4] and "ETA 0 s" in text[0]

    play(looks, (80, 24), script, whole(looks))


def test_a_run_that_has_ended_says_so_and_every_end() -> None:
    looks = looks_at(killed_and_replaced())

    async def script(app, pilot) -> None:
        text = screen(app)
        assert "synthetic · outer step 6 of 6 · done" in text[0] and text[1].startswith("took 17 s")
        assert any(line.startswith("r01-1") and "killed" in line for line in text)

    play(looks, (80, 24), script, whole(looks))


def test_without_colour_every_state_is_still_a_word(mine, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    looks = looks_at(mine, 60 * STEP_S + 60)  # beats are a minute old

    async def script(app, pilot) -> None:
        assert sum("silent" in line for line in screen(app) if line.startswith("r0")) == 3
        lines = [list(strip.apply_filter(app._filters[-1], app.screen.background_colors[1])) for strip in strips(app)]
        colours = {seg.style.color.triplet for line in lines for seg in line if seg.style and seg.style.color}
        assert colours and all(c is None or len(set(c)) == 1 for c in colours), "grey alone"

    play(looks, (80, 24), script, whole(looks))


# -------------------------------------------------------------------- troubles


@pytest.mark.quick(1)
@pytest.mark.parametrize(("width", "lines"), [(80, 2), (240, 1)])
def test_troubles_stand_above_the_events_with_what_to_do(width, lines) -> None:
    run = long_run(60, 24)  # $47 of $50
    looks = looks_at(run, 60 * STEP_S + 5)

    async def script(app, pilot) -> None:
        text = screen(app)
        at = next(i for i, line in enumerate(text) if line.startswith("! $47"))
        assert "of $50.00 are spent" in text[at] and "the run ends by itself" in text[at + lines - 1]
        assert "launched" in " ".join(text[at + lines :])
        await pilot.press("e")
        await until(pilot, lambda: isinstance(app.screen, TextWindow) and bool(app.screen.pages))
        await pilot.pause()
        assert "resume RUN --max-usd X --max-hours H` allows more (docs/troubles.md#budget)" in app.screen.pages[0]

    play(looks, (width, 40), script, whole(looks))


def test_a_slot_that_was_not_read_lately_is_not_counted_as_silent(mine) -> None:
    """A large fleet's beats are read in turns: a stall must not say that no replica beats."""
    report = read_report(mine.store)
    now = T0 + 60 * STEP_S + 400
    read_at = dict.fromkeys(report.beats, T0 + 60 * STEP_S + 3)
    report.url = "s3://bucket/run"
    (found,) = [t for t in find_troubles(with_beats_as_read(report, read_at, now), now) if t.kind == "stalled"]
    assert "3 of 3 replicas beat" in found.text
    (found,) = [t for t in find_troubles(with_beats_as_read(report, {}, now), now) if t.kind == "stalled"]
    assert "0 of 3 replicas beat" in found.text


def test_completions_of_steps_whose_reward_may_be_hacked_are_flagged() -> None:
    sample = (12, "r00", "2+2?", "4 4 4 4", 1.0)
    assert "is its reward hacked?" in windows.rollout_words(sample, range(11, 20))
    assert "hacked" not in windows.rollout_words(sample, range(12, 20))


# -------------------------------------------------------------------- size


def test_a_terminal_that_is_resized_is_drawn_anew_and_one_that_is_too_small_says_so(mine) -> None:
    looks = looks_at(mine, 60 * STEP_S + 5)

    async def script(app, pilot) -> None:
        for size, there in (((30, 8), False), ((60, 14), True), ((160, 50), True), ((20, 5), False), ((80, 24), True)):
            await pilot.resize_terminal(*size)
            await pilot.pause()
            text = "\n".join(screen(app))
            assert ("r00-1" in text) == there and ("too small" in " ".join(text.split())) == (not there), size
        assert "counted" not in "\n".join(screen(app))

    play(looks, (80, 24), script, whole(looks))


# -------------------------------------------------------------------- keys that read and write


async def until(pilot, true: Callable[[], bool]) -> None:
    """Threads answer when they do; the test's own limit finds a hang."""
    while not true():
        await pilot.pause(0.01)


def founded(tmp_path: Path) -> tuple[RunLooks, FileStore]:
    """A small run in a folder: two replicas of this machine, one killed and replaced."""
    store = FileStore(tmp_path / "run")
    b = killed_and_replaced(Bucket(store=None, replicas=2).store)
    for key in b.store.list(""):
        store.put(key, b.store.get(key) or b"")
    record = RunRecord.decode(store.get(layout.RUN) or b"")
    return RunLooks(View(Run(store.url, store, record), None), FixedClock(T0 + 17)), store


def window_text(app: WatchApp) -> str:
    return " ".join(" ".join(screen(app)).replace("│", " ").split())


def test_l_shows_the_log_of_a_dead_session_out_of_the_bucket(tmp_path) -> None:
    looks, _ = founded(tmp_path)

    async def script(app, pilot) -> None:
        await pilot.press("down", "l")
        await until(pilot, lambda: isinstance(app.screen, TextWindow) and bool(app.screen.pages))
        await pilot.pause()
        assert "log of r01-1" in window_text(app) and "r01-1: killed" in window_text(app)
        await pilot.press("escape")
        assert len(app.screen_stack) == 1

    play(looks, (100, 30), script, whole(looks))


def test_o_shows_rollouts_with_their_rewards_the_newest_first_and_the_first_ones_last(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(windows, "ROLLOUTS", 2)
    looks, store = founded(tmp_path)
    for n, step in enumerate((1, 2, 3)):
        rows = [{"step": step, "tools": []}]
        rows += [
            {
                "first": 1,
                "reward": r,
                "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": f"say {r}"}],
            }
            for r in (0.25, 1.0)
        ]
        store.put(layout.rollouts_key("r00", 1, n), "\n".join(map(json.dumps, rows)).encode())
    store.put(layout.rollouts_key("r00", 1, 3), b"\x00 half a li")

    async def script(app, pilot) -> None:
        await pilot.press("o")
        await until(pilot, lambda: isinstance(app.screen, TextWindow) and bool(app.screen.pages))
        await pilot.pause()
        assert "(1 of 4; n newer, p older)" in window_text(app) and "outer step 4 · reward 0.25" in window_text(app)
        await pilot.press("p")
        await pilot.pause()
        assert "outer step 4 · reward 1 " in window_text(app) and "say 1.0" in window_text(app)
        await pilot.press("p")
        await pilot.pause()
        assert "outer step 2 · reward 0.25" in window_text(app)

    play(looks, (100, 30), script, whole(looks))


def test_drain_and_scale_ask_before_they_write(tmp_path) -> None:
    looks, store = founded(tmp_path)
    write_control(store, FixedClock(T0), steps=12)  # a finished run would take no wish

    async def script(app, pilot) -> None:
        await pilot.press("end", "d")
        await until(pilot, lambda: isinstance(app.screen, AskWindow))
        await pilot.press("n", "s")
        await until(pilot, lambda: isinstance(app.screen, NumberWindow))
        await pilot.press("4", "enter")
        await until(pilot, lambda: isinstance(app.screen, AskWindow))
        assert "From 2 to 4 replicas?" in app.screen.question
        await pilot.press("escape")
        assert read_control(store).records == 2, "nothing was agreed to"
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, AskWindow))
        await pilot.press("y")
        await until(pilot, lambda: read_control(store).drains != ())
        await pilot.press("s", "4", "enter")
        await until(pilot, lambda: isinstance(app.screen, AskWindow))
        await pilot.press("y")
        await until(pilot, lambda: read_control(store).replicas == 4)

    play(looks, (80, 24), script, whole(looks))


@pytest.mark.slow
def test_a_number_that_is_none_and_a_quorum_that_is_not_met_write_nothing(tmp_path) -> None:
    looks, store = founded(tmp_path)

    async def script(app, pilot) -> None:
        await pilot.press("s", "0", "enter")
        await pilot.pause()
        assert len(app.screen_stack) == 1
        await pilot.press("s", "escape", "q")

    play(looks, (80, 24), script, whole(looks))
    assert read_control(store).records == 1


# -------------------------------------------------------------------- a bucket that may only be read, or is slow


@pytest.fixture
def bucket(monkeypatch) -> Iterator[S3Server]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    with S3Server() as s3:
        yield s3


@pytest.mark.slow
def test_read_only_credentials_show_everything_and_a_drain_says_that_nothing_was_written(
    bucket, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    url = copied(long_run(20, 2).store, bucket)
    bucket.fault("403", op="Put|Post|Delete|Create", times=1000)
    looks = RunLooks(open_view(url, COSTS), FixedClock(T0 + 20 * STEP_S + 3))

    async def script(app, pilot) -> None:
        assert "outer step 20 of 21" in screen(app)[0]
        await pilot.press("d")
        await until(pilot, lambda: isinstance(app.screen, AskWindow))
        await pilot.press("y")
        await until(pilot, lambda: bool(app._notifications))
        (said,) = list(app._notifications)
        assert "nothing was written: these credentials may only read" in said.message

    play(looks, (80, 24), script, whole(looks))
    wrote = [op for op, _ in bucket.requests if op not in ("GetObject", "ListObjectsV2", "HeadObject")]
    assert len(wrote) <= 1, "looking writes nothing; the drain tried once"


def test_a_look_writes_nothing_and_a_view_that_is_killed_leaves_nothing(mine) -> None:
    before = {key: mine.store.get(key) for key in mine.store.list("")}
    looks = looks_at(mine, 60 * STEP_S + 5)
    whole(looks)
    for _ in range(20):
        looks.clock.at += 5
        looks.next_picture()
    store = looks.run.store
    assert {verb for verb, _ in store.calls} <= {"get", "list"}
    assert {key: mine.store.get(key) for key in mine.store.list("")} == before


def test_a_bucket_that_answers_503_leaves_the_picture_and_is_asked_less_and_less(mine) -> None:
    looks = looks_at(mine, 60 * STEP_S + 5)
    picture = whole(looks)
    looks.run.store.faults += [Fault("get", "", error=StoreUnclear("503 SlowDown"), times=9999)]
    pauses = list[float]()
    for _ in range(3):
        looks.clock.at += 60
        with pytest.raises(StoreUnclear):
            looks.next_picture()
        pauses.append(looks.pause_s)
    assert pauses == [5.0, 10.0, 20.0] and picture.seen.step == 60
    looks.run.store.faults.clear()
    looks.clock.at += 60
    later = looks.next_picture()
    assert later is not None and looks.pause_s == 5.0 and later.seen.step == 60


def test_the_keys_do_not_wait_for_a_bucket_that_does_not_answer(mine) -> None:
    looks = looks_at(mine, 60 * STEP_S + 5)
    gate = threading.Event()
    picture = whole(looks)
    looks.run.store.faults.append(Fault("get", "", error=None, before=lambda: gate.wait(120) and None, times=1000))

    async def run() -> None:
        app = WatchApp(looks)
        looks.clock.at += 60
        async with app.run_test(size=(80, 24)) as pilot:
            app.show(picture)
            await pilot.press("m")
            await pilot.pause()
            assert "loss by outer step" in "\n".join(screen(app)), "drawn while the look hangs"
            await pilot.press("q")
        gate.set()

    asyncio.run(run())


# -------------------------------------------------------------------- what is no run, or half of one


def shows(looks: RunLooks, *texts: str) -> None:
    async def script(app, pilot) -> None:
        body = " ".join("\n".join(screen(app)).split())
        for text in texts:
            assert text in body, body

    play(looks, (100, 30), script, whole(looks))


@pytest.mark.parametrize("as_json", [False, True])
def test_a_url_with_no_run_is_a_mistake_and_says_which(tmp_path, capsys, as_json) -> None:
    assert cli.main(["watch", str(tmp_path / "nothing"), *(["--json"] if as_json else [])]) == 2
    assert "diloco watch:" in (said := capsys.readouterr().err) and "nothing" in said and "run" in said


def test_a_run_of_a_newer_wire_version_is_named_as_such(tmp_path, capsys) -> None:
    store = FileStore(tmp_path / "run")
    record = json.loads(Bucket().store.get(layout.RUN) or b"")
    store.put(layout.RUN, json.dumps({**record, "wire": 99}).encode())
    assert cli.main(["watch", str(tmp_path / "run")]) == 2
    assert "99" in capsys.readouterr().err


def test_a_commit_of_a_newer_version_stops_the_curve_and_is_said() -> None:
    run = long_run(10, 2)
    body = json.loads(run.store.get(layout.commit_key(6)) or b"")
    run.store.put(layout.commit_key(6), json.dumps({**body, "wire": 99}).encode())
    shows(looks_at(run, 10 * STEP_S), "outer step 6 of 11", "! commit 6 cannot be read")


def test_a_run_that_was_only_founded_and_an_empty_one_wait() -> None:
    shows(
        looks_at(Bucket(replicas=2), 5), "outer step 0 of 6 · not begun", "r00", "starting", "no outer step has written"
    )
    bare = Bucket(replicas=2)
    bare.store.delete(["control/000000.json"])
    shows(looks_at(bare, 5), "outer step 0", "no replica has joined yet")


def test_half_written_records_and_odd_log_lines_are_passed_over_and_counted() -> None:
    run = long_run(10, 2)
    run.store.put(layout.beat_key("r00"), b'{"kind": "beat", "sl')
    run.store.put(layout.offer_key(9, "r01", 0), b"")
    run.store.put(layout.log_key("r00", 1, run._logs["r00", 1]), b'{"at": "yesterday"}\n\xff\xfe\n[1, 2]\n{"at": 1')
    run.store.put("log/stray", b"x")
    shows(looks_at(run, 10 * STEP_S), "outer step 10 of 11", "starting", "4 lines or objects under log/ are not events")


def test_a_look_or_a_second_that_comes_while_the_screen_goes_draws_nothing() -> None:
    """On a slow machine: "No nodes match '#header' on Screen()"."""
    looks, kept = looks_at(long_run(5, 2)), list[WatchApp]()

    async def script(app, pilot) -> None:
        kept.append(app)

    play(looks, (100, 30), script, whole(looks))
    kept[0].draw_ages()
    kept[0].show(None, "no answer")


# -------------------------------------------------------------------- a real terminal


@pytest.mark.slow
def test_in_a_real_terminal_it_draws_resizes_leaves_at_once_and_puts_the_terminal_back(tmp_path) -> None:
    """One process, killed and started again: the bucket is as it was."""
    _, store = founded(tmp_path)
    before = {key: store.get(key) for key in store.list("")}
    argv = [sys.executable, "-m", "executors.cli.main", "watch", str(tmp_path / "run")]
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}  # as `docker exec -e` passes them
    first = Terminal(argv, env, 80, 24)
    first.wait_for("outer step 6 of 6")
    os.kill(first.pid, signal.SIGKILL)
    assert first.wait_until_gone() == -signal.SIGKILL
    again = Terminal(argv, env, 80, 24)
    again.wait_for("reward by outer step, 0 to 5")
    again.resize(160, 50)
    again.wait_for("counted")
    code, _ = again.end("q")
    assert code == 0 and "\x1b[?1049l" in again.drawn and "\x1b[?25h" in again.drawn
    assert {key: store.get(key) for key in store.list("")} == before


# -------------------------------------------------------------------- not a terminal


def test_not_a_terminal_gets_a_line_per_step_until_the_run_is_done() -> None:
    out = io.StringIO()
    assert write_lines(looks_at(killed_and_replaced()), out, key_values) == 0
    lines = out.getvalue().splitlines()
    assert sum(line.startswith("step=") for line in lines) == 6 and any("event=killed" in line for line in lines)


def test_lines_go_on_while_the_bucket_does_not_answer_and_json_is_json() -> None:
    run, out = long_run(5, 2), io.StringIO()
    looks = looks_at(run, 5 * STEP_S, [Fault("get", layout.commit_key(3), error=StoreUnclear("503"), times=2)])

    def grow(seconds: float) -> None:
        looks.clock.at += seconds
        if looks.clock.at > T0 + 5 * STEP_S + 60 and run.store.get(layout.commit_key(5)) is None:
            run.step(5)

    looks.clock.sleep = grow  # type: ignore[method-assign]
    assert write_lines(looks, out, json.dumps) == 0
    found = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [row["step"] for row in found if "by" in row] == list(range(6))
    assert any("no answer, asking again" in row.get("note", "") for row in found)


def test_a_bucket_that_never_answers_is_said_at_once_and_each_trouble_once() -> None:
    """The note waited for the next answer, so there was nothing to see for ever."""
    out, pauses = io.StringIO(), iter(range(3))
    looks = looks_at(long_run(5, 2), 0.0, [Fault("get", "", error=StoreUnclear("503"), times=10**6)])

    def sleep(seconds: float) -> None:
        if next(pauses, None) is None:
            raise KeyboardInterrupt

    looks.clock.sleep = sleep  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        write_lines(looks, out, key_values)
    assert out.getvalue() == 'note="no answer, asking again: 503"\n'


def test_without_textual_a_line_says_how_to_get_it(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "textual", None)
    with pytest.raises(ConfigError, match=r"pip install 'serverless-diloco\[watch\]'"):
        check_textual()


def test_nothing_but_the_view_imports_textual() -> None:
    modules = "executors.cli.main, executors.cli.watch.run, executors.cli.main as p"
    code = f"import sys, {modules}; p.make_parser(); sys.exit(bool({{'textual', 'rich'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=180).returncode == 0


# -------------------------------------------------------------------- words


def test_a_curve_is_squeezed_into_its_room_and_never_wider() -> None:
    curve = MetricCurve("reward", "reward", tuple((t, t / 999) for t in range(1000)))
    for width in (20, 38, 80):
        assert len(words.metric_line(curve, width, chosen=True)) <= width
        chart = words.chart_lines(curve, width, 6)
        assert len(chart) == 6 and all(len(line) <= width for line in chart)
    flat = words.chart_lines(replace(curve, points=((0, 0.5), (1, 0.5))), 40, 6)
    assert "▄" in "".join(flat) or "█" in "".join(flat)


def test_a_row_fits_and_keeps_its_reason() -> None:
    row = SessionRow(
        "r01", 12, "a-machine-with-a-long-name", "NVIDIA H100 80GB HBM3", "lost", ended=1.0, end="lost", why="x" * 300
    )
    for width in (80, 160):
        line = words.row_line(row, {}, width)
        assert len(line) == width and line.startswith("r01-12") and line.endswith("…") and "lost: xxx" in line
    assert "after killed" in words.row_line(SessionRow("r01", 13), {"r01": "killed"}, 80)


def test_parts_of_the_header_that_find_no_room_go_from_the_end() -> None:
    report = read_report(long_run(10, 2).store)
    seen = replace(overview(report, T0 + 305), name="a name of very many words indeed")
    for width in (40, 80, 160):
        lines = words.header_lines(seen, costs(report, T0 + 305), report.wanted, width)
        assert all(len(line) <= width for line in lines) and "outer step 10 of 11" in lines[0]
