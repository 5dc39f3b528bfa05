"""Reading a long run: how much is asked, what is kept on this machine, and that nothing old is ever shown for new."""

import json
import math
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.process.journal import Journal, read_log
from diloco.run.record import Run, RunRecord, Superseded, read_run
from diloco.runlog import steps
from diloco.runlog.look import CONTROLS, Rounds
from diloco.runlog.reader import Reader, Report, read_report
from diloco.runlog.scope import COSTS, EVERYTHING, STATUS
from diloco.views.page.charts import draw_figure
from executors.cli import main as cli
from executors.cli.looking import status
from executors.supervision.money.bills import costs
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import round_to_fp32
from rendezvous.errors import Forged, StoreUnclear
from rendezvous.records.records import Beat, Commit
from rendezvous.store import Store
from rendezvous.stores import ahead
from rendezvous.stores import cache as caching
from rendezvous.stores.ahead import AT_ONCE, Ahead
from rendezvous.stores.cache import Cache, cache_of
from rendezvous.stores.cloud.store import CloudStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.run_key import KEY, under_key
from tests.diloco.test_report import T0, FixedClock, killed_and_replaced
from tests.support.fakes import Fault, FaultyStore
from tests.support.long_run import STEP_S, LongRun, copied, copy, long_run
from tests.support.s3_server import S3Server

NOW = T0 + 10_000.0


class Counted(FaultyStore):
    """Counts requests, and how many were under way at the same time."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.most, self._under_way, self._lock = 0, 0, threading.Lock()

    def _call(self, verb: str, key: str, request: Callable[[], object]) -> object:
        with self._lock:
            self._under_way += 1
            self.most = max(self.most, self._under_way)
        try:
            return super()._call(verb, key, request)
        finally:
            with self._lock:
                self._under_way -= 1

    @property
    def requests(self) -> int:
        return len(self.calls)


def void(_: object) -> None:
    """Ignore a callback's result."""


@pytest.fixture(scope="module")
def long() -> LongRun:
    """400 outer steps of 4 replicas.  Read only."""
    return long_run(400, 4)


@pytest.fixture
def cache(tmp_path: Path) -> Callable[[], Cache]:
    return lambda: Cache(tmp_path / "cache")


def kept_after(run: LongRun, cache: Callable[[], Cache], scope=STATUS) -> Report:
    return read_report(run.store, scope, cache())


# -------------------------------------------------------------------- how much is asked


def test_status_asks_one_request_per_outer_step_and_some_for_the_newest(long) -> None:
    """Before: 3,652 GETs, one after the other, and a LIST of every log."""
    store = Counted(long.store)
    report = read_report(store, STATUS)
    assert report.head == 400 and store.requests <= 400 + 506  # 4 offers of 8 early steps, one of 24 more
    assert [key for verb, key in store.calls if verb == "list"] == [layout.CONTROLS]


def test_a_second_status_asks_for_what_may_have_changed_alone(long, cache) -> None:
    first = kept_after(long, cache)
    store = Counted(long.store)
    again = read_report(store, STATUS, cache())
    assert again == first
    assert store.requests <= 75 and not [k for _, k in store.calls if k in map(layout.commit_key, range(399))]


def test_costs_ask_a_number_of_requests_that_does_not_grow_with_the_run(long) -> None:
    few, many = Counted(long_run(40, 4).store), Counted(long.store)
    assert costs(read_report(many, COSTS), NOW).usd == pytest.approx(costs(read_report(long.store), NOW).usd)
    read_report(few, COSTS)
    assert many.requests <= few.requests + 40 <= 160


def test_a_stray_control_record_far_ahead_is_not_walked_to() -> None:
    """Before: a first look asked for every key up to it, a million perhaps, so `status` and `stop` took minutes."""
    run = long_run(40, 4)
    for _ in range(CONTROLS):  # more than a first look asks for at once
        write_control(run.store, run.clock, replicas=4)
    plain, littered = Counted(run.store), Counted(run.store)
    read_report(plain, STATUS)
    run.store.put(layout.control_key(9_999), b"{}")
    read_report(littered, STATUS)
    assert littered.requests <= plain.requests + 4


def test_what_goes_together_is_asked_at_the_same_time_and_never_more_than_a_bounded_number(long) -> None:
    store = Counted(long.store)
    Ahead(store).ask(layout.commit_key(t) for t in range(300))
    assert store.requests == 300 and store.most <= AT_ONCE
    gate = threading.Barrier(8, timeout=120)
    faults = [Fault("get", layout.commit_key(t), error=None, before=lambda: void(gate.wait())) for t in range(8)]
    Ahead(FaultyStore(long.store, faults)).ask(
        layout.commit_key(t) for t in range(8)
    )  # all eight, or the barrier breaks
    assert not gate.broken


def test_a_reader_that_looks_again_asks_a_few_requests_per_slot(long) -> None:
    store = Counted(long.store)
    reader = Reader(store, STATUS)
    reader.refresh()
    store.calls.clear()
    reader.refresh()
    assert store.requests <= 6 * 5


@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 7, 8, 9, 100, 1023, 1024, 1025, 5000])
@pytest.mark.parametrize("low", [0, 1])
def test_the_length_of_a_series_is_found_in_a_few_rounds(n, low) -> None:
    store, found = Counted(MemoryStore()), list[int]()
    for t in range(n):
        store.inner.put(layout.commit_key(t), b"x")
    rounds = Rounds(Ahead(store))
    rounds.count(layout.commit_key, min(low, n), 10, found.append)
    rounds.run()
    assert found == [n] and store.requests <= 150


# -------------------------------------------------------------------- the same answers


def shown(report: Report) -> list[str]:
    return [*status.status_table(report, NOW), *status.cost_table(costs(report, NOW), report)]


def test_status_shows_what_the_whole_run_shows(long) -> None:
    whole = status.status_dict(read_report(long.store, EVERYTHING), NOW)
    assert status.status_dict(read_report(long.store, STATUS), NOW) == whole
    assert shown(read_report(long.store, STATUS))[1:] == shown(read_report(long.store, EVERYTHING))[1:]
    assert whole["sessions"][1]["how"] == "lost" and whole["sessions"][2]["counted_in"] == 199


def test_every_scope_agrees_on_a_small_run() -> None:
    b = killed_and_replaced()
    reports = [read_report(b.store, scope) for scope in (EVERYTHING, STATUS)]
    assert reports[0] == reports[1]
    assert read_report(b.store, COSTS).head == 6 and read_report(b.store, COSTS).done


def test_a_reader_that_looks_on_sees_every_new_record(cache) -> None:
    run = LongRun(60, 2)
    reader = Reader(run.store, STATUS, cache())
    for t in range(60):
        run.step(t)
        if t == 30:
            run.lose("r01", STEP_S * (t + 1) + 1)
        if t % 7 == 0:
            write_control(run.store, run.clock, max_usd=50.0 + t)
            reader.refresh()
    assert reader.refresh() == read_report(run.store) and reader.refresh().wanted.max_usd == 106


# -------------------------------------------------------------------- what is kept


def test_nothing_that_changes_is_kept(long, cache) -> None:
    kept_after(long, cache, EVERYTHING)
    kinds = {kind for kind in ("run", "seal", "control", "beat", "model") if cache().keys(kind)}
    assert kinds == set() and len(cache().keys("commit")) == 400
    newest = {
        layout.log_key(slot, long.generation[slot], long._logs[slot, long.generation[slot]] - 1) for slot in long.slots
    }
    assert not newest & set(cache().keys("log")), "its writer may still write it again"


def test_a_run_that_goes_on_shows_its_newest_beat_wish_and_head(cache) -> None:
    run = long_run(50, 2)
    kept_after(run, cache)
    run.step(50)
    run.store.put(layout.beat_key("r00"), Beat("r00", 1, 10, "wait", 51, 0, 4.0, NOW, note="for r01").encode())
    write_control(run.store, run.clock, stop=True)
    report = kept_after(run, cache)
    assert report.head == 51 and report.beats["r00"].phase == "wait" and report.wanted.stop


def test_a_log_that_its_writer_wrote_again_is_read_again(cache) -> None:
    """A journal whose answer was lost writes the same object once more, with more lines."""
    run = long_run(50, 2)
    kept_after(run, cache)
    key = layout.log_key("r00", 1, run._logs["r00", 1] - 1)
    more = json.dumps({"at": T0 + 1501, "event": "nothing_learned", "cause": "all rewards are equal"})
    run.store.put(key, (run.store.get(key) or b"") + more.encode() + b"\n")
    assert [e["cause"] for e in kept_after(run, cache).of_kind("nothing_learned")] == ["all rewards are equal"]


@pytest.mark.parametrize("harm", ["cut", "flip", "empty", "another file", "a folder"])
def test_a_file_that_is_damaged_is_read_again_from_the_bucket(long, cache, tmp_path, harm) -> None:
    first = kept_after(long, cache)
    for path in (tmp_path / "cache").iterdir():
        raw = path.read_bytes()
        flipped = raw[:100] + bytes([raw[100] ^ 1]) + raw[101:]
        body = {"cut": raw[: len(raw) // 2], "flip": flipped, "empty": b"", "another file": b"{}"}.get(harm)
        path.unlink()
        path.mkdir() if body is None else path.write_bytes(body)
    assert kept_after(long, cache) == first
    assert kept_after(long, cache) == first


def test_two_processes_keep_and_tidy_up_at_the_same_time(long, tmp_path) -> None:
    def one_of_many() -> None:
        for _ in range(12):
            found = Cache(tmp_path / "cache")
            found.add(layout.commit_key(next(numbers)), b"commit")
            found.save()

    numbers = iter(range(1000))
    threads = [threading.Thread(target=one_of_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    files = list((tmp_path / "cache").glob("*"))
    assert 0 < len(files) <= caching.MOST_FILES + 4 and all(f.suffix == ".records" for f in files)
    assert set(Cache(tmp_path / "cache").keys("commit")) <= {layout.commit_key(t) for t in range(48)}
    assert read_report(long.store, STATUS, Cache(tmp_path / "cache")).head == 400


def test_files_are_put_together_and_lose_nothing(cache) -> None:
    for t in range(40):
        found = cache()
        found.add(layout.commit_key(t), bytes([t]))
        found.save()
    assert {key: cache().get(key) for key in cache().keys("commit")} == {
        layout.commit_key(t): bytes([t]) for t in range(40)
    }


def test_a_home_that_cannot_be_written_is_no_error(long, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    assert read_report(long.store, STATUS, Cache(tmp_path / "file" / "cache")).head == 400


def test_the_cache_is_bounded_and_the_longest_unused_runs_go(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(caching, "ALL_BYTES", 30_000)
    for i in range(5):
        found = Cache(tmp_path / f"run{i}")
        found.add(layout.commit_key(0), b"x" * 10_000)
        found.save()
        os.utime(tmp_path / f"run{i}", (i, i))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run3", "run4"]


def test_one_run_fills_its_share_and_no_more(cache, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(caching, "RUN_BYTES", 25_000)
    for t in range(9):
        found = cache()
        found.add(layout.commit_key(t), b"x" * 10_000)
        found.save()
    assert len(cache().keys("commit")) == 3


# -------------------------------------------------------------------- another run under the same URL


def founded(run: LongRun, url: str, nonce: str) -> Run:
    config = {"name": "long", "outer": {"sync_every": 6}}
    record = RunRecord(config, {"outer": {}}, {}, nonce, T0)
    run.store.put(layout.RUN, record.encode())
    store = FaultyStore(run.store)
    store.url = url
    return Run(url, store, record)


def test_a_run_that_was_founded_again_has_a_cache_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    old, new = founded(long_run(30, 2), "s3://b/x", "first"), founded(long_run(7, 3), "s3://b/x", "second")
    for run, head, replicas in ((old, 30, 2), (new, 7, 3), (old, 30, 2)):
        report = read_report(run.store, STATUS, cache_of(run.store, run.record.nonce))
        assert (report.head, report.wanted.replicas, len(report.sessions)) == (head, replicas, replicas + 1)


def test_a_copy_of_a_run_elsewhere_has_a_cache_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    here, there = founded(long_run(30, 2), "s3://b/x", "same"), founded(long_run(12, 2), "s3://b/copy", "same")
    assert [read_report(r.store, STATUS, cache_of(r.store, r.record.nonce)).head for r in (here, there, here)] == [
        30,
        12,
        30,
    ]


def test_a_bucket_that_was_set_back_to_an_older_state_is_read_anew(cache) -> None:
    """Restored from a backup, and gone on differently: commit 29 is another one than the one that is kept."""
    kept_after(long_run(30, 2), cache)
    older = long_run(29, 2)
    assert kept_after(older, cache).head == 29
    kept_after(long_run(30, 2), cache)
    other = long_run(29, 2)
    other.commit(29, 1.0, [other.offer(29, "r01", 2, 0.5)])
    for t in range(30, 35):
        other.step(t)
    report = kept_after(other, cache)
    assert report.head == 35 and report.steps[29].fresh == ("r01",) and all(s.linked for s in report.steps)
    assert report == read_report(other.store, STATUS)


def test_what_is_kept_is_known_when_the_bucket_has_lost_it(cache) -> None:
    run = long_run(30, 2)
    whole = kept_after(run, cache)
    run.store.delete([layout.offer_key(28, "r00", 0), layout.commit_key(3), layout.log_key("r00", 1, 20)])
    assert kept_after(run, cache) == whole
    assert read_report(run.store).head == 3


# -------------------------------------------------------------------- garbage, faults, run keys


def test_garbage_is_not_kept_so_that_it_can_be_mended(cache) -> None:
    run = long_run(30, 2)
    good = {
        k: run.store.get(k) or b""
        for k in (layout.commit_key(20), layout.offer_key(29, "r00", 0), layout.claim_key("r00", 1))
    }
    for key in good:
        run.store.put(key, b"{}")
    harmed = kept_after(run, cache)
    assert harmed.head == 20 and "commit 20 cannot be read" in harmed.damage
    for key, body in good.items():
        run.store.put(key, body)
    mended = kept_after(run, cache)
    assert mended == read_report(run.store, STATUS) and mended.head == 30 and not mended.damage


def test_a_store_that_does_not_answer_is_an_error_and_spoils_no_later_look(cache) -> None:
    run = long_run(30, 2)
    store = FaultyStore(run.store, [Fault("get", layout.commit_key(7), error=StoreUnclear("no answer"))])
    with pytest.raises(StoreUnclear, match="no answer"):
        read_report(store, STATUS, cache())
    assert read_report(store, STATUS, cache()) == read_report(run.store, STATUS)


@pytest.mark.parametrize("part", ["", "control", "steps/", "log/"])
def test_a_store_that_refuses_every_request_is_an_error_and_not_an_endless_run(part) -> None:
    """Before: a record that cannot be read counts as there, so a reader looked on for ever for the end of a series."""
    run = long_run(30, 2)
    store = FaultyStore(run.store)
    reader = Reader(store, STATUS)
    reader.refresh()
    store.calls.clear()
    store.faults.append(Fault("get", part, error=StoreUnclear("503 SlowDown"), times=5000))
    with pytest.raises(StoreUnclear):
        reader.refresh()
    assert len(store.calls) < 100
    store.faults.clear()
    assert reader.refresh() == read_report(run.store, STATUS)


def test_a_claim_that_is_gone_is_asked_for_once_per_look(long) -> None:
    """Before: a GET for each commit that lists this session."""
    run = long_run(60, 2)
    run.store.delete([layout.claim_key("r00", 1)])
    store = Counted(run.store)
    assert [x.name for x in read_report(store, STATUS).sessions] == ["r01-1", "r01-2"]
    assert Counter(store.calls)["get", layout.claim_key("r00", 1)] <= 3


def sealed(secret: bytes) -> tuple[MemoryStore, LongRun]:
    """The same bucket, bare and as its run key shows it."""
    bare, run = MemoryStore(), LongRun.__new__(LongRun)
    store = under_key(bare, FixedClock(), secret)
    plain = long_run(30, 2).store
    for key in plain.list(""):
        store.put(key, plain.get(key) or b"")
    run.store = store  # type: ignore[assignment]
    return bare, run


def test_a_sealed_run_is_read_and_kept_and_a_forged_record_is_passed_over(cache) -> None:
    bare, run = sealed(b"a key of sixteen characters")
    first = kept_after(run, cache)
    assert first.head == 30 and first == kept_after(run, cache)
    commit = Commit.decode(run.store.get(layout.commit_key(29)) or b"")
    bare.put(layout.commit_key(30), Commit(**{**vars(commit), "t": 30}).encode())
    with pytest.raises(Forged, match="was not written with this run's key"):
        kept_after(run, cache)
    bare.delete([layout.commit_key(30)])
    bare.put(layout.offer_key(29, "r00", 0), b'{"forged":1}')
    assert kept_after(run, cache) == first, "it was read while it was true"
    assert "r00" not in read_report(run.store, STATUS).steps[29].h


# -------------------------------------------------------------------- over HTTP, as a command


@pytest.fixture
def bucket(monkeypatch, tmp_path):
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {"ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x", "REGION": "us-east-1"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with S3Server() as s3:
        yield s3


def asked(s3: S3Server, capsys, *argv: str) -> tuple[int, str]:
    s3.requests.clear()
    assert cli.main(list(argv)) == 0
    return len(s3.requests), capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_over_http_ask_little_at_first_and_hardly_anything_again(bucket, capsys, long, tmp_path) -> None:
    url = copied(long.store, bucket)
    first, text = asked(bucket, capsys, "status", url)
    again, same = asked(bucket, capsys, "status", url)
    assert first <= 906 and again <= 75 and "outer step 400 of 401" in text
    assert text.splitlines()[2:5] == same.splitlines()[2:5]
    assert asked(bucket, capsys, "costs", url)[0] <= 60
    whole, _ = asked(bucket, capsys, "report", url, "--to", str(tmp_path))
    lists = 10  # of steps/, snapshots/ and leave/, so that "none lost" is true of the bucket and not of the cache
    assert asked(bucket, capsys, "report", url, "--to", str(tmp_path))[0] <= 75 + lists < whole


def test_a_run_that_goes_on_between_two_commands_is_shown_as_it_is(bucket, capsys) -> None:
    run = long_run(40, 2)
    url = copied(run.store, bucket)
    asked(bucket, capsys, "status", url)
    run.step(40)
    run.beat(41, NOW)
    for key in run.store.list(""):
        copy(run.store, bucket, key)
    requests, text = asked(bucket, capsys, "status", url)
    assert "outer step 41 of 41" in text and text.strip().endswith("done") and requests <= 60


# -------------------------------------------------------------------- round trips: each costs a latency


class RoundTrips:
    """Counts requests that wait for one another: a pool's are made at once, AT_ONCE at a time, any other one alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self._together = 0, False
        for verb in ("get", "list"):
            monkeypatch.setattr(CloudStore, verb, self._counted(getattr(CloudStore, verb)))
        monkeypatch.setattr(ahead, "ThreadPoolExecutor", lambda *_: self)

    def map(self, function: Callable[[str], object], keys: list[str]) -> list[object]:
        self.count, self._together = self.count + math.ceil(len(keys) / AT_ONCE), True
        try:
            return [function(key) for key in keys]
        finally:
            self._together = False

    def _counted(self, request: Callable[..., object]) -> Callable[..., object]:
        def one(store: CloudStore, key: str) -> object:
            self.count += not self._together
            return request(store, key)

        return one

    def of(self, *argv: str) -> int:
        self.count = 0
        assert cli.main(list(argv)) == 0
        return self.count


@pytest.fixture
def round_trips(monkeypatch, bucket) -> RoundTrips:
    return RoundTrips(monkeypatch)


@pytest.mark.slow
def test_a_second_look_at_a_run_that_stood_still_takes_one_round_trip(bucket, round_trips, long) -> None:
    """Before: seven for `status` (commit 0, run.json, two rounds, two claims and a beat of the supervisor)."""
    url = copied(long.store, bucket)
    for verb in ("status", "costs"):
        round_trips.of(verb, url)
        assert round_trips.of(verb, url) == 1


def test_a_first_look_takes_one_round_trip_per_hundred_requests_and_few_more(bucket, round_trips, long) -> None:
    url = copied(long.store, bucket)
    bucket.requests.clear()
    assert round_trips.of("status", url) <= len(bucket.requests) / AT_ONCE + 7


@pytest.mark.slow
def test_a_second_look_at_a_run_that_went_on_takes_two(bucket, round_trips) -> None:
    run = long_run(40, 4)
    url = copied(run.store, bucket)
    round_trips.of("status", url)
    for t in (40, 41):
        run.step(t)
    run.beat(42, NOW)
    copied(run.store, bucket)
    assert round_trips.of("status", url) == 2


def test_a_run_with_many_control_records_takes_one_round_trip_more(bucket, round_trips) -> None:
    """Every few minutes a supervisor writes down a later end of its lease."""
    run = long_run(10, 2)
    for minute in range(70):
        write_control(run.store, run.clock, until=T0 + 60.0 * minute)
    url = copied(run.store, bucket)
    assert round_trips.of("status", url) <= 6
    assert round_trips.of("status", url) == 2


def test_a_sealed_run_takes_no_more_round_trips(bucket, round_trips, monkeypatch, capsys) -> None:
    monkeypatch.setenv(KEY, secret := "a key of sixteen characters")
    bare, _ = sealed(secret.encode())
    url = copied(bare, bucket)
    round_trips.of("status", url)
    assert "outer step 30 of 31" in (first := capsys.readouterr().out)
    assert round_trips.of("status", url) == 1
    assert capsys.readouterr().out.splitlines()[1:] == first.splitlines()[1:]


def test_another_run_at_the_same_url_is_shown_as_it_is(bucket, round_trips, capsys) -> None:
    """The guess was made of the records of the run that stood there before."""
    url = copied((old := long_run(30, 2)).store, bucket)
    round_trips.of("status", url)
    for key in old.store.list(""):
        bucket.path("bucket", f"run/{key}").unlink()
    copied(founded(long_run(7, 3), url, "second").store, bucket)
    capsys.readouterr()
    round_trips.of("status", url)
    shown = capsys.readouterr().out
    assert "outer step 7 of 8" in shown and "r02-1" in shown and "r01-2" in shown and "counted in 4 steps" in shown


def test_a_run_that_was_founded_again_is_found_by_its_first_name(bucket, round_trips, capsys) -> None:
    url = copied(MemoryStore(), bucket)
    url = copied(founded(long_run(9, 2), "s3://b/x", "second").store, bucket, "run/again").replace("/again", "")
    bucket.path("bucket", "run/steps/0000000000/commit.json").parent.mkdir(parents=True)
    bucket.path("bucket", "run/steps/0000000000/commit.json").write_bytes(Superseded("n", T0).encode())
    round_trips.of("status", url)
    assert "outer step 9 of 10" in capsys.readouterr().out
    assert round_trips.of("status", url) == 2


def test_a_commit_that_another_release_kept_is_read_by_the_rules(cache) -> None:
    run = long_run(3, 2)
    first = kept_after(run, cache)
    again = cache()
    bodies = [run.store.get(layout.commit_key(t)) or b"" for t in range(3)]
    again.clear()
    for t, body in enumerate((bodies[0], b'{"kind":"commit","t":1}', bodies[2])):
        again.add(layout.commit_key(t), body)
    again.save()
    assert "commit 1 cannot be read" in kept_after(run, cache).damage
    assert steps.kept_commit(bodies[1]) == steps.read_commit(bodies[1])
    assert first.head == 3


def test_opening_a_run_asks_for_two_records_at_once(bucket) -> None:
    """Before: run.json, seal.json, run.json again, in turn."""
    url = copied(long_run(1, 2).store, bucket)
    bucket.requests.clear()
    assert read_run(url).record.nonce == "a-run-of-its-own"
    assert sorted(key for _, key in bucket.requests) == ["run/run.json", "run/seal.json"]


# -------------------------------------------------------------------- light


def test_the_picture_of_a_long_run_has_no_artist_per_outer_step(long) -> None:
    """Before: 2,410 patches for these 400 steps, which took most of the drawing time."""
    assert sum(len(ax.patches) for ax in draw_figure(read_report(long.store)).axes) <= 2 * 6


@given(st.floats(width=64, allow_nan=False, min_value=-3.4e38, max_value=3.4e38))
def test_rounding_to_fp32_without_numpy_is_numpys(x) -> None:
    assert round_to_fp32(x) == float(np.float32(x))


def test_an_event_with_a_text_of_any_length_is_read() -> None:
    """The error of a crash may be a whole page, and a progress bar is one line of tens of kilobytes."""
    store = MemoryStore("memory://x")
    journal = Journal(store, FixedClock(), "r00", 1)
    journal.emit("crashed", error="size mismatch: " + "x" * 100_000)
    journal.emit("lost", slot="r01", tail=["y" * 100_000, "\udcff"])
    journal.flush()
    log = read_log(store, layout.log_key("r00", 1, 0))
    assert [e["event"] for e in log.events] == ["crashed", "lost"] and log.passed_over == 0


def test_a_user_without_a_home_has_no_cache(monkeypatch) -> None:
    """Before: a traceback, in a container with an arbitrary user."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    store = MemoryStore()
    store.cheap = False  # type: ignore[misc]
    assert cache_of(store, "nonce") is None
