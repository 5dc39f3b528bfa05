"""The probe says yes to stores that keep their word, and why not to the others."""

import re
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rendezvous.clock import SystemClock
from rendezvous.engine.probe import Probe, doctor_table, probe_store, sync_estimate
from rendezvous.errors import StoreRefused, StoreUnclear
from rendezvous.store import Body, Buffer, Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.open import open_store
from rendezvous.stores.race import race_writers, why_unfit
from tests.support.fakes import Fault, FaultyStore
from tests.support.s3_server import S3Server

SMALL = 1 << 20


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch):
    with S3Server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield server


@pytest.fixture(params=["file", "memory", "s3", "s3fs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param.startswith("s3"):
        request.getfixturevalue("s3")
        return open_store("s3://bucket/run" if request.param == "s3" else "fsspec+s3://bucket/run")
    return FileStore(tmp_path) if request.param == "file" else MemoryStore()


@pytest.mark.quick(2)
def test_a_good_store_passes_and_is_left_as_it_was(store: Store) -> None:
    store.put("mine", b"v")
    seen = probe_store(store, SystemClock(), SMALL)
    assert seen.why_unfit() is None and seen.race.winners == (1,) * 5 and seen.list_lag_s is not None
    assert seen.put_bytes_s > 1e6 and seen.get_bytes_s > 1e6 and 0 < seen.get_s < 1
    assert store.list("") == ["mine"]
    assert "This store can carry a run." in doctor_table(seen)


def test_a_store_that_overwrites_is_refused_with_the_count(s3: S3Server) -> None:
    s3.overwrites = True
    seen = probe_store(open_store("s3://bucket/run"), SystemClock(), SMALL)
    why = seen.why_unfit() or ""
    assert why.startswith("silently overwrites: 16 of 16 writers won the same key") and "Ceph's gateway" in why
    table = doctor_table(seen)
    assert "NO    16 at once, 5 rounds: 16 winners" in table and "cannot carry a run: silently" in table


class Sloppy(MemoryStore):
    """Looks, then writes; a few writers at a time get through."""

    def __init__(self) -> None:
        super().__init__()
        self.looked = threading.Barrier(3)

    def create(self, key: str, body: Buffer) -> None:
        if "race" in key and key not in self._objects:
            try:
                self.looked.wait(0.05)
                self.put(key, body)
                return
            except threading.BrokenBarrierError:
                self.looked.reset()
        super().create(key, body)


def test_a_look_then_write_store_is_found_out() -> None:
    assert "writers won" in (race_writers(Sloppy(), SystemClock()).why_unfit() or "")


class Stale(MemoryStore):
    def get(self, key: str) -> bytes | None:
        return None if "own" in key else super().get(key)


class Blind(MemoryStore):
    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        super().get_into(key, out, start)
        return True


class Liar(MemoryStore):
    def get(self, key: str) -> bytes | None:
        return b"somebody else" if "race" in key else super().get(key)


class Shifted(MemoryStore):
    def get_into(self, key: str, out: memoryview, start: int = 0) -> bool:
        return super().get_into(key, out, start + 1)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(Stale, "read-after-write"), (Blind, "past the end"), (Liar, "has another object"), (Shifted, "wrong bytes")],
)
def test_every_other_flaw_has_its_reason(kind: type[MemoryStore], reason: str) -> None:
    assert reason in (probe_store(kind(), SystemClock(), SMALL).why_unfit() or "")


class Keeping(MemoryStore):
    """Says that it deletes."""

    def delete(self, keys: Iterable[str]) -> None: ...


def test_a_store_that_deletes_nothing_can_carry_a_run_that_keeps_everything() -> None:
    seen = probe_store(Keeping(), SystemClock(), SMALL)
    assert seen.why_unfit() is None and not seen.deletes
    assert 'deletes objects         NO    set fleet.keep = "all"' in doctor_table(seen)


@pytest.mark.parametrize(
    ("broken", "row", "fatal"),
    [
        ("range", "reads parts of objects  NO    the store broke", True),
        ("listed", "lists new objects       NO    the store broke", False),
        ("blob", "up, down                NO    the store broke", True),
        ("gone", "deletes objects         NO    the store broke", False),
        ("small", "small read, create      NO    the store broke", False),
    ],
)
def test_a_measurement_that_fails_is_a_row_and_the_others_are_made(broken: str, row: str, fatal: bool) -> None:
    class Broken(MemoryStore):
        def put(self, key: str, body: Body) -> None:
            super().put(key, body) if f"/{broken}" not in key else self._break()

        def get(self, key: str) -> bytes | None:
            return super().get(key) if "/small" not in key or broken != "small" else self._break()

        def _break(self) -> Any:
            raise StoreRefused("the store broke")

    seen = probe_store(Broken(), SystemClock(), SMALL)
    table = doctor_table(seen, 1_000_000)
    assert row in table and len(table.splitlines()) >= 9, table
    assert ("the store broke" in (seen.why_unfit() or "")) == fatal


def test_a_few_errors_are_no_verdict(s3: S3Server) -> None:
    for kind in ("lost", "409", "503"):
        s3.fault(kind, op="PutObject", times=5)
    s3.fault("500", op="GetObject", times=3)
    assert probe_store(open_store("s3://bucket/run"), SystemClock(), SMALL).why_unfit() is None


def test_a_store_where_every_create_fails_cannot_carry_a_run(s3: S3Server) -> None:
    s3.fault("409", op="PutObject", key="race|small|twice", times=10_000)
    assert "no key could be created" in (
        probe_store(open_store("s3://bucket/run"), SystemClock(), SMALL).why_unfit() or ""
    )


@pytest.mark.parametrize(("mute", "verdict"), [(16, True), (10_000, False)])
def test_no_answer_is_no_verdict(s3: S3Server, mute: int, verdict: bool) -> None:
    """Seen with a wrong port, and with a full Ceph cluster, which lets writes hang: half a minute for each round."""
    s3.fault("503", op="PutObject", key="race", times=mute)
    if verdict:
        assert race_writers(open_store("s3://bucket/run"), SystemClock()).why_unfit() is None
    else:
        with pytest.raises(StoreUnclear, match="503"):
            race_writers(open_store("s3://bucket/run"), SystemClock())
        assert s3.count("PutObject") == 32


def test_a_store_that_answers_nothing_is_asked_by_one_client_first() -> None:
    """Through s3fs, which retries for 6 s, the sixteen writers of the race took 8 minutes to say nothing."""
    asked = list[str]()

    class Mute(MemoryStore):
        def get(self, key: str) -> bytes | None:
            asked.append(key)
            raise StoreUnclear("no connection")

        def create(self, key: str, body: Buffer) -> None:
            raise AssertionError("the race began")

    with pytest.raises(StoreUnclear, match="no connection"):
        probe_store(Mute(), SystemClock(), SMALL)
    assert len(asked) == 2


def test_a_refusing_store_is_its_own_message(s3: S3Server) -> None:
    s3.expired = True
    with pytest.raises(StoreRefused, match="renew it"):
        probe_store(open_store("s3://bucket/run"), SystemClock(), SMALL)


def test_slow_lists_are_only_noted() -> None:
    class Lagging(MemoryStore):
        def list(self, prefix: str) -> list[str]:
            return []

    class Fast(SystemClock):
        def now(self) -> float:
            return super().now() * 1000

        def sleep(self, seconds: float) -> None:
            super().sleep(seconds / 1000)

    seen = probe_store(Lagging(), Fast(), SMALL)
    assert seen.list_lag_s is None and seen.why_unfit() is None and "slow" in doctor_table(seen)


def test_the_probe_cleans_up_when_it_fails() -> None:
    inner = MemoryStore()
    with pytest.raises(ZeroDivisionError):
        probe_store(FaultyStore(inner, [Fault("list", error=ZeroDivisionError())]), SystemClock(), SMALL)
    assert inner.list("") == []


# ---------------------------------------------------------------------- the estimate


@pytest.fixture(scope="module")
def measured() -> Probe:
    seen = probe_store(MemoryStore("s3://bucket/run"), SystemClock(), SMALL)
    return replace(seen, put_bytes_s=1e8, get_bytes_s=2e8, get_s=0.1, create_s=0.1)


def test_the_estimate_counts_what_a_sync_does(measured: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    two = sync_estimate(measured, 500_000_000, 2)
    assert (two.mode, two.upload_bytes, two.download_bytes) == ("direct", 4_000_000_000, 4_000_000_000)
    assert two.puts == 2 * (62 + 2) + 1 and two.gets == 2 * (120 + 2 + 10)
    assert two.seconds == pytest.approx(2e9 / 1e8 + 2e9 / 2e8 + 0.5 * (0.5 + 0.6) + 2 * 0.1 + 4 * 0.1)
    four = sync_estimate(measured, 500_000_000, 4)  # S + S/4 up, 6/4·S down
    assert (four.mode, four.upload_bytes, four.download_bytes) == ("sharded", 10_000_000_000, 12_000_000_000)
    assert four.puts == 4 * (62 + 2 + 17 + 1) + 1 and four.gets == 4 * (2 * 3 * 30 + 4 + 10)
    assert four.seconds == pytest.approx(2.5e9 / 1e8 + 3e9 / 2e8 + 0.5 * (0.5 + 3 * 0.6) + 3 * 0.1 + 6 * 0.1)
    assert four.dollars == pytest.approx(four.puts * 5e-6 + four.gets * 4e-7)
    assert four.egress_dollars == pytest.approx(12 * 0.09)
    topk = sync_estimate(measured, 500_000_000, 4, "topk")  # each replica reads all others' bodies
    assert topk.mode == "direct" and topk.download_bytes == 3 * topk.upload_bytes < four.download_bytes / 42


def test_prices_are_only_given_where_they_are_known(measured: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert sync_estimate(replace(measured, url="file:///tmp/x"), 10**6, 2).dollars is None
    assert "costs about" not in doctor_table(replace(measured, url="file:///tmp/x"), 10**6)
    r2 = replace(measured, url="s3://b/run?endpoint=https://x.r2.cloudflarestorage.com")
    assert sync_estimate(r2, 10**6, 2).egress_dollars == 0.0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio.example")
    assert sync_estimate(measured, 10**6, 2).dollars is None


def test_the_table_reads_like_this(measured: Probe, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    table = doctor_table(measured, 500_000_000, 4)
    assert table.splitlines()[0] == "s3://bucket/run"
    assert "500 M parameters, 4 replicas, fp32, sharded" in table and "10.00 GB up, 12.00 GB down" in table
    assert "for requests; $1.08 more from outside that cloud" in table
    assert all(len(line) <= 120 for line in table.splitlines())


@pytest.mark.parametrize("kind", ["409", "lost", "503"])
def test_one_conflict_is_no_overwrite(s3: S3Server, kind: str) -> None:
    """A 409 with no object there made the second body the first one, and an honest store was refused."""
    s3.fault(kind, op="Put", key="twice", times=1)
    assert why_unfit(open_store("s3://bucket/run"), SystemClock()) is None


def test_a_link_that_is_too_slow_is_said(measured: Probe) -> None:
    table = doctor_table(replace(measured, put_bytes_s=1e6, get_bytes_s=1e6), 500_000_000, 4)
    assert re.search(r"is too slow +NO +replicas give up after 600 s", table)
    assert "takes more than 120 s" in (replace(measured, put_bytes_s=4e4).why_unfit() or "")
