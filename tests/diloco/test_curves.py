"""The rows of a run's curves: when one is complete, its numbers, and each written once into a tracker that forgets
nothing but is killed at any point.  Trackers here are lists; tests/diloco/test_trackers.py has the real ones."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco.run.record import RunRecord
from diloco.runlog.reader import FORGET_EVERY, Reader, read_report
from diloco.views.curves import PATIENCE_S, SILENT_S, complete_rows, curve_point, is_over, read_logged_steps
from diloco.views.samples import MOST_CHARACTERS, SampleReader
from diloco.views.trackers import feed as feeding
from diloco.views.trackers.feed import RETRY_S, Feed, hold_alone
from diloco.views.trackers.make import check_tracker, make_tracker, missing_login
from diloco.views.trackers.tracker import TrackedRun, TrackerBusy, TrackerError
from executors.cli import main as cli
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.records.records import Beat, Leave
from rendezvous.store import Store
from rendezvous.stores.files import FileStore
from tests.diloco.test_report import T0, Bucket, FixedClock, killed_and_replaced
from tests.support.long_run import LongRun, long_run

LATER = T0 + 1e6  # the patience with every replica is over


class Sudden(BaseException):
    """A SIGKILL, for a test: nothing after it runs."""


class ListTracker:
    """Keeps rows in `shelf`, which outlives it, as a database would.   dies_at: writes until the kill."""

    name = "list"

    def __init__(self, shelf: dict[int, list], dies_at: int | None = None, fails: int = 0) -> None:
        self.shelf, self.dies_at, self.fails, self.opened, self.tables = shelf, dies_at, fails, 0, {}

    def open(self, run: TrackedRun) -> int:
        self.opened += 1
        return max(self.shelf, default=-1)

    def write(self, point, samples) -> None:
        if self.dies_at == 0:
            raise Sudden
        if self.fails:
            self.fails -= 1
            raise OSError("no route to host")
        self.dies_at = None if self.dies_at is None else self.dies_at - 1
        self.shelf.setdefault(point.step, []).append(point)
        self.tables[point.step] = samples

    def close(self) -> None:
        """Nothing is buffered."""


def feed_of(store: Store, *trackers: ListTracker, wall: float = LATER, samples: int = 8) -> Feed:
    run = TrackedRun("long", "nonce")
    reader, clock = Reader(store), FixedClock(wall)
    return Feed(run, reader, SampleReader(store, samples), trackers, clock, lambda text: None)


def rows_of(store: Store, now: float, over: frozenset[str] = frozenset()) -> int:
    report = read_report(store)
    return complete_rows(report, read_logged_steps(report.events), start=0, now=now, over=over)


# -------------------------------------------------------------------- when a row is complete


class Uneven(Bucket):
    """Two replicas whose logs come when the test says so."""

    def __init__(self) -> None:
        super().__init__(steps=10, replicas=2)
        for slot in ("r00", "r01"):
            self.claim(slot, 1, 0.5)
            self.tell(slot, 1, 1.0, "joined", step=0)

    def step_event(self, t: int, at: float, slot: str, generation: int, theta: str | None = None) -> None:
        """LoggedSteps by `log`, when it is time."""

    def take(self, t: int, *slots: str) -> None:
        self.commit(t, 10.0 * (t + 1), [self.offer(t, slot, 1, 0.5) for slot in slots or ("r00", "r01")])

    def log(self, t: int, slot: str) -> None:
        super().step_event(t, 10.0 * (t + 1), slot, 1)

    def beat(self, slot: str, at: float) -> None:
        self.store.put(layout.beat_key(slot), Beat(slot, 1, 9, "train", 0, 0, 1.0, T0 + at).encode())


def test_a_row_waits_for_the_log_of_each_replica_that_its_commit_counts() -> None:
    b = Uneven()
    b.take(0)
    assert rows_of(b.store, T0 + 11) == 0, "not even row 0: θ₀'s evaluation may come with these logs"
    b.log(0, "r00")
    assert rows_of(b.store, T0 + 11) == 0
    b.log(0, "r01")
    assert rows_of(b.store, T0 + 11) == 2


def test_a_replica_that_logged_a_later_step_adds_nothing_to_this_one() -> None:
    b = Uneven()
    b.take(0)
    b.take(1)
    b.log(0, "r00")
    b.log(1, "r00")
    b.log(1, "r01")  # its line of step 0 was lost with its process, say: no row waits for it
    assert rows_of(b.store, T0 + 21) == 3


def test_patience_ends_and_so_does_a_session() -> None:
    b = Uneven()
    b.take(0)
    b.log(0, "r00")
    assert rows_of(b.store, T0 + 10 + PATIENCE_S) == 0
    assert rows_of(b.store, T0 + 10 + PATIENCE_S + 1) == 2
    assert rows_of(b.store, T0 + 11, frozenset({"r01-1"})) == 2


def test_a_session_counts_as_over_from_the_second_look_on() -> None:
    """Its last log may have come after the first look's list of logs, and before the look at its goodbye."""
    b = Uneven()
    b.take(0)
    b.log(0, "r00")
    shelf: dict[int, list] = {}
    feed = feed_of(b.store, ListTracker(shelf), wall=T0 + 11)
    feed.open_all()
    feed.look()
    b.store.create(layout.leave_key("r01", 1), Leave("r01", 1, 1, "base", "done", "n", T0 + 11).encode())
    feed.look()
    assert not shelf
    b.log(0, "r01")
    feed.look()
    assert shelf[1][0].numbers["r01/samples"] == 192


def test_an_actor_is_not_awaited() -> None:
    b = Uneven()
    write_control(b.store, b.clock, actors=1)
    b.claim("a00", 1, 0.5)
    b.tell("a00", 1, 1.0, "joined", step=0)
    b.take(0)
    b.log(0, "r00")
    b.log(0, "r01")
    b.beat("a00", 12.0)
    assert rows_of(b.store, T0 + 13) == 2


def test_a_late_replica_is_awaited_while_it_beats_and_a_silent_one_is_not() -> None:
    b = Uneven()
    b.take(0, "r00")
    b.log(0, "r00")
    b.beat("r01", 12.0)
    assert rows_of(b.store, T0 + 13) == 0
    b.log(0, "r01")
    assert rows_of(b.store, T0 + 13) == 2
    b.take(1, "r00")
    b.log(1, "r00")
    assert rows_of(b.store, T0 + 21) == 2, "its last beat is of a moment ago"
    assert rows_of(b.store, T0 + 21 + SILENT_S) == 3, "it was killed, and nobody has logged so"


# -------------------------------------------------------------------- a row's numbers


def test_a_row_has_each_replica_the_fleet_and_the_outer_step() -> None:
    report = read_report(long_run(6, 2).store)
    logged = read_logged_steps(report.events)
    assert complete_rows(report, logged, start=0, now=LATER, over=frozenset()) == 7
    point = curve_point(report, logged, 3)
    assert point is not None and point.step == 3 and point.at == T0 + 90
    n = point.numbers
    assert n["r00/reward"] == n["fleet/reward"] == pytest.approx(0.1016)
    assert n["r01/loss"] == n["fleet/loss"] == pytest.approx(0.0123456)
    assert n["fleet/samples"] == 2 * n["r00/samples"] == 384 and n["fleet/bytes_up"] == 800_000
    assert n["fleet/inner_s"] == 25 and n["fleet/replicas"] == 2 and n["fleet/seconds"] == 30
    assert n["outer/rho"] == 0.71 and n["outer/outer_lr"] == 0.7
    assert {"kl", "entropy", "grad_norm", "completion_length", "h", "bytes_down"} <= {
        k.removeprefix("r00/") for k in n if k.startswith("r00/")
    }
    assert not [k for k in n if k.endswith(("/at", "/step", "/generation", "/listed"))]


def test_a_number_that_a_later_release_measures_is_there_too() -> None:
    b = Uneven()
    b.take(0)
    for slot, value in (("r00", 0.25), ("r01", 0.75)):
        b.tell(slot, 1, 10.1, "step", step=0, h=6, **{"reward_format": value})
    report = read_report(b.store)
    point = curve_point(report, read_logged_steps(report.events), 1)
    assert point is not None
    assert point.numbers["r01/reward_format"] == 0.75 and point.numbers["fleet/reward_format"] == 0.5


def test_a_late_offer_is_its_replicas_and_not_the_fleets() -> None:
    report = read_report(killed_and_replaced().store)
    point = curve_point(report, read_logged_steps(report.events), 3)
    assert point is not None and point.numbers["fleet/reward"] == point.numbers["r00/reward"]
    assert point.numbers["r01/reward"] == 0.5 and point.numbers["fleet/replicas"] == 1
    after = curve_point(report, read_logged_steps(report.events), 4)
    assert after is not None and after.numbers["fleet/late"] == 1


def test_row_0_is_nothing_where_nothing_is_evaluated() -> None:
    report = read_report(long_run(2, 2).store)
    assert curve_point(report, read_logged_steps(report.events), 0) is None


class Evaluated(Uneven):
    """Held-out prompts are scored every two outer steps."""

    def __init__(self) -> None:
        super().__init__()
        config = {"name": "n", "outer": {}, "eval": {"every": 2}}
        self.store.put(layout.RUN, RunRecord(config, {"outer": {}}, {}, "n", T0).encode())

    def score(self, step: int, slot: str, at: float, total: float) -> None:
        share = {
            "share": int(slot[1:]),
            "shares": 2,
            "prompts": 10,
            "total": 20,
            "greedy": {"reward": [10, total, total]},
        }
        self.tell(slot, 1, at, "evaluated", step=step, **share)


def test_a_row_has_the_evaluation_of_the_weights_that_its_commit_made_and_waits_for_all_shares() -> None:
    b = Evaluated()
    for slot, total in (("r00", 2.0), ("r01", 4.0)):
        b.score(0, slot, 2.0, total)
    for t in range(2):
        b.take(t)
        for slot in ("r00", "r01"):
            b.log(t, slot)
    assert rows_of(b.store, T0 + 21) == 2, "row 2 is to be evaluated"
    b.score(2, "r00", 22.0, 7.0)
    assert rows_of(b.store, T0 + 23) == 2
    b.score(2, "r01", 23.0, 8.0)
    assert rows_of(b.store, T0 + 24) == 3
    report = read_report(b.store)
    logged = read_logged_steps(report.events)
    first, second, third = (curve_point(report, logged, row) for row in range(3))
    assert first is not None and second is not None and third is not None
    assert first.numbers["eval/greedy/reward"] == pytest.approx(0.3) and set(first.numbers) == {
        "eval/greedy/reward", "eval/greedy/reward_error", "eval/prompts"
    }  # fmt: skip
    assert not [name for name in second.numbers if name.startswith("eval/")]
    assert third.numbers["eval/greedy/reward"] == pytest.approx(0.75) and third.numbers["eval/prompts"] == 20


def test_an_evaluation_that_lost_a_replica_is_written_with_the_prompts_that_it_rests_on() -> None:
    b = Evaluated()
    for t in range(2):
        b.take(t)
        for slot in ("r00", "r01"):
            b.log(t, slot)
    b.score(2, "r00", 22.0, 7.0)
    assert rows_of(b.store, T0 + 23, frozenset({"r01-1"})) == 3
    report = read_report(b.store)
    point = curve_point(report, read_logged_steps(report.events), 2)
    assert point is not None and point.numbers["eval/prompts"] == 10


# -------------------------------------------------------------------- each row once


@settings(max_examples=40, deadline=None, derandomize=True)
@given(kills=st.lists(st.integers(0, 9), max_size=6), grows=st.lists(st.integers(0, 4), max_size=6))
def test_each_row_is_written_once_and_in_order_through_any_kills(kills, grows) -> None:
    run = LongRun(12, 2)
    for t in range(12):
        run.step(t)
        if t == 5:
            run.lose("r01", 30.0 * 6 + 1)
    shelf: dict[int, list] = {}
    head = 12
    for i, dies_at in enumerate([*kills, None]):
        for t in range(head, head + (grows[i] if i < len(grows) else 0)):
            run.step(t)
            head = t + 1
        feed = feed_of(run.store, ListTracker(shelf, dies_at))
        try:
            feed.open_all()
            feed.look()
        except Sudden:
            continue
    assert list(shelf) == list(range(1, head + 1))
    assert all(len(points) == 1 for points in shelf.values())


def test_a_tracker_that_fails_is_opened_again_and_keeps_no_other_from_its_rows() -> None:
    run = long_run(8, 2)
    good, bad = ListTracker({}), ListTracker({}, fails=1)
    feed = feed_of(run.store, good, bad)
    told = list[str]()
    feed.say = told.append
    feed.open_all()
    feed.look()
    assert list(good.shelf) == list(range(1, 9)) and not bad.shelf
    assert told == [f"list: OSError: no route to host; again in {RETRY_S:.0f} s"]
    feed.look()
    assert bad.opened == 1, "not before the pause is over"
    feed.clock.sleep(RETRY_S)
    report = feed.look()
    assert list(bad.shelf) == list(range(1, 9)) and all(len(p) == 1 for p in bad.shelf.values())
    assert not feed.has_all(report), "the run wants a ninth step"


def test_has_all_is_true_once_the_run_is_done_and_every_row_written() -> None:
    run = long_run(8, 2)
    write_control(run.store, run.clock, steps=8)
    feed = feed_of(run.store, ListTracker({}))
    feed.open_all()
    assert feed.has_all(feed.look())
    assert not is_over(read_report(run.store), 8) and is_over(read_report(run.store), 9)


# -------------------------------------------------------------------- samples


def rollouts(store: Store, slot: str, n: int, step: int, *texts: str) -> None:
    rows: list[dict] = [{"step": step, "tools": {}}]
    for text in texts:
        messages = [{"role": "user", "content": f"q {text}"}, {"role": "assistant", "content": text}]
        rows.append({"messages": messages, "first": 1, "reward": 0.5, "environment": None, "unsure": {}})
    body = "\n".join(json.dumps(row) for row in rows)
    store.put(layout.rollouts_key(slot, 1, n), body.encode())


def test_samples_go_with_their_row_by_turns_of_each_replica() -> None:
    run = long_run(3, 2)
    for t in range(3):
        rollouts(run.store, "r00", t, t, f"a{t}", f"b{t}", f"c{t}")
        rollouts(run.store, "r01", t, t, f"d{t}")
    tracker = ListTracker({})
    feed = feed_of(run.store, tracker, samples=3)
    feed.open_all()
    feed.look()
    assert [s[3] for s in tracker.tables[2]] == ["a1", "d1", "b1"]
    assert tracker.tables[2][0] == (2, "r00", "q a1", "a1", 0.5)


def test_a_writer_that_goes_on_reads_no_samples_of_rows_that_are_there() -> None:
    run = long_run(9, 2)
    for t in range(9):
        rollouts(run.store, "r00", t, t, f"a{t}")
    read = list[str]()

    class Counting:
        def __getattr__(self, name: str):
            return getattr(run.store, name)

        def get(self, key: str) -> bytes | None:
            read.append(key)
            return run.store.get(key)

    samples = SampleReader(Counting(), 4)  # type: ignore[arg-type]
    samples.read_from(8)
    assert sorted(read) == [
        *(layout.rollouts_key("r00", 1, n) for n in (6, 7, 8)),
        layout.rollouts_key("r01", 1, 0),  # what long_run put there: no rollouts
    ]
    assert [s[3] for s in samples.samples_of(8)] == ["a7"] and not samples.samples_of(7)
    samples.read_from(3)  # a tracker has lost rows
    assert [s[3] for s in samples.samples_of(3)] == ["a2"]


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1]\n[2]", b'{"step": "x"}', b"\xff\xfe", b'{"step": 1}\n{"messages": 3}']
)
def test_garbage_for_rollouts_is_no_sample(body) -> None:
    run = long_run(2, 2)
    run.store.put(layout.rollouts_key("r00", 1, 7), body)
    samples = SampleReader(run.store, 4)
    samples.read_from(0)
    assert [samples.samples_of(row) for row in range(4)] == [[]] * 4


def test_a_long_completion_is_cut_and_a_tool_call_is_shown() -> None:
    run = long_run(1, 2)
    rollouts(run.store, "r00", 0, 0, "x" * 10_000)
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    row = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, call], "first": 2}
    run.store.put(layout.rollouts_key("r01", 1, 0), f'{{"step": 0}}\n{json.dumps(row)}'.encode())
    samples = SampleReader(run.store, 4)
    samples.read_from(0)
    long, tool = samples.samples_of(1)
    assert len(long[3]) == MOST_CHARACTERS
    assert tool[2:] == ("[system] s\n[user] u", '[{"function": {"name": "add"}}]', None)


# -------------------------------------------------------------------- what a person hears, before anything is written


def test_a_tracker_without_its_package_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("diloco.views.trackers.make.find_spec", lambda name: None)
    with pytest.raises(TrackerError, match=r"pip install 'serverless-diloco\[trackio\]'"):
        check_tracker("trackio", {})
    with pytest.raises(TrackerError, match="Use one of: wandb, trackio, tensorboard"):
        check_tracker("mlflow", {})
    with pytest.raises(TrackerError, match="there is no tracker"):
        make_tracker("mlflow", Path())


def test_a_tracker_that_is_switched_off_is_no_tracker() -> None:
    """Before: WANDB_MODE=disabled counted as a login, and 40 rows were told as written that nobody had."""
    assert missing_login("wandb", {"WANDB_MODE": "offline"}) == ""
    assert "Set WANDB_MODE=offline" in missing_login("wandb", {"WANDB_MODE": "disabled", "WANDB_API_KEY": "x"})


@pytest.mark.parametrize(
    ("name", "environ", "says"),
    [
        ("wandb", {}, "Run `wandb login`"),
        ("wandb", {"WANDB_BASE_URL": "https://wandb.example.org"}, "at wandb.example.org"),
        ("wandb", {"WANDB_API_KEY": "k"}, ""),
        ("wandb", {"WANDB_MODE": "offline"}, ""),
        ("trackio", {}, ""),
        ("trackio", {"TRACKIO_SPACE_ID": "me/runs"}, "Run `hf auth login`"),
        ("trackio", {"TRACKIO_SPACE_ID": "me/runs", "HF_TOKEN": "t"}, ""),
        ("trackio", {"TRACKIO_SERVER_URL": "http://box:7860"}, "Set TRACKIO_WRITE_TOKEN"),
        ("trackio", {"TRACKIO_SERVER_URL": "http://box:7860/?write_token=t"}, ""),
        ("tensorboard", {}, ""),
    ],
)
def test_a_tracker_without_its_login_says_the_next_step(tmp_path, name, environ, says) -> None:
    words = missing_login(name, {"HOME": str(tmp_path), "WANDB_DIR": str(tmp_path), **environ})
    assert says in words and bool(words) == bool(says)
    assert not words or "nothing was written" in words


def test_a_login_in_a_netrc_or_in_wandbs_settings_is_one(tmp_path) -> None:
    environ = {"HOME": str(tmp_path), "WANDB_DIR": str(tmp_path)}
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password k\n")
    assert not missing_login("wandb", environ)
    assert missing_login("wandb", {**environ, "WANDB_BASE_URL": "https://other.example.org"})
    (tmp_path / ".netrc").write_text("garbage here\n")
    assert missing_login("wandb", environ)
    settings = tmp_path / "wandb" / "settings"
    settings.parent.mkdir()
    settings.write_text("[default]\nmode = offline\n")
    assert not missing_login("wandb", environ)


def test_the_command_says_it_before_it_opens_the_run(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("diloco.views.trackers.make.find_spec", lambda name: name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    assert cli.main(["track", str(tmp_path / "no-run"), "--to", "wandb"]) == 2
    assert "no login to wandb" in capsys.readouterr().err


def test_two_writers_on_one_machine_are_one_too_many(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    run = TrackedRun("a run", "0123456789abcdef")
    (held,) = hold_alone(run, ["trackio"])
    with pytest.raises(TrackerBusy, match="another process of this machine"):
        hold_alone(run, ["tensorboard", "trackio"])
    held.close()
    for lock in hold_alone(run, ["tensorboard", "trackio"]):
        lock.close()


# -------------------------------------------------------------------- the command


def test_the_command_reads_a_bucket_that_nobody_may_write_to(tmp_path, monkeypatch, capsys) -> None:
    run = long_run(5, 2)
    store = FileStore(tmp_path / "run")
    for key in run.store.list(""):
        store.put(key, run.store.get(key) or b"")
    shelf: dict[int, list] = {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("executors.cli.writing.track.check_tracker", lambda name: None)
    monkeypatch.setattr("executors.cli.writing.track.make_tracker", lambda name, folder: ListTracker(shelf))
    for verb in ("put", "create", "delete"):
        monkeypatch.setattr(FileStore, verb, lambda *_: pytest.fail("it wrote"))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main(["track", str(tmp_path / "run"), "--to", "tensorboard", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trackers"] == {"tensorboard": {"written": 5, "trouble": ""}} and answer["outer_step"] == 5
    assert list(shelf) == [1, 2, 3, 4, 5]


def test_the_config_that_a_tracker_gets_is_the_runs() -> None:
    record = RunRecord.decode(long_run(1, 2).store.get(layout.RUN) or b"")
    run = TrackedRun("a/b c", record.nonce, config=record.config)
    assert run.label == "a-b-c-a-run-of" and run.config["inner"]["model"] == "Qwen/Qwen2.5-0.5B"
    assert feeding.RETRY_MOST_S >= RETRY_S


def test_a_clock_that_is_an_hour_ahead_ends_no_patience() -> None:
    """Before: each row was written at once, without the logs that came a moment later."""
    b = Uneven()
    b.take(0)
    b.log(0, "r00")
    b.beat("r00", 11.0)
    b.beat("r01", 11.0)
    shelf: dict[int, list] = {}
    feed = feed_of(b.store, ListTracker(shelf), wall=T0 + 3600.0)
    feed.open_all()
    feed.look()
    assert 1 not in shelf, "r01's log is still to come"
    b.log(0, "r01")
    feed.look()
    assert 1 in shelf


def test_old_events_are_forgotten_once_each_tracker_has_them() -> None:
    run = long_run(300, 2)
    feed = feed_of(run.store, ListTracker({}))
    feed.open_all()
    feed.look()
    feed.look()
    kept = [e for lines in feed.reader._logs.values() for e in lines if e["event"] == "step"]
    assert len(kept) < 2 * 2 * FORGET_EVERY
