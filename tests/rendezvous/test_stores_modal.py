"""modal:// on the real client against a server on loopback: the contract, races, expiry, foreign pickles, bad days.

The server forgets entries that were not touched for seven days, loses answers, and cuts transfers off.
"""

import itertools
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("modal")

from grpclib import Status

from rendezvous.clock import SystemClock
from rendezvous.errors import KeyExists, StoreRefused, StoreUnclear
from rendezvous.store import PatientStore, Store, put_once
from rendezvous.stores.modal.blocks import BLOCK, blocks_of
from rendezvous.stores.modal.mirror import DAY, KEPT, Mirror, pointer_to
from rendezvous.stores.modal.store import ModalStore, parse_url
from rendezvous.stores.modal.wire import Wire, explain_error
from rendezvous.stores.open import open_store
from tests.diloco.test_s3_fleet import audited
from tests.rendezvous.test_store import (  # noqa: F401  the contract, run here on this file's `store`
    BIG,
    test_bodies_of_every_size,
    test_create_writes_once,
    test_delete_forgets_and_does_not_mind_what_is_missing,
    test_get_into_fills_the_buffer_or_says_no,
    test_list_is_sorted_and_by_prefix,
    test_one_of_sixteen_threads_wins,
    test_put_and_get,
)
from tests.support.fleet import Fleet
from tests.support.modal_server import ModalPlatform, ModalServer


@pytest.fixture
def platform() -> Iterator[ModalPlatform]:
    with ModalPlatform() as platform:
        yield platform


@pytest.fixture
def server(platform: ModalPlatform) -> ModalServer:
    return platform.server


class Calendar(SystemClock):
    """A wall clock that the server's runs with."""

    def __init__(self, server: ModalServer) -> None:
        self._server = server

    def wall(self) -> float:
        return super().wall() + self._server.ahead_s


@pytest.fixture
def fresh(server: ModalServer) -> Callable[[], ModalStore]:
    """Another process's store, as far as one process can show it."""
    return lambda: ModalStore("modal://runs/first", Calendar(server))


@pytest.fixture
def store(fresh: Callable[[], ModalStore]) -> Store:
    return fresh()


# ---------------------------------------------------------------------- names and bodies


def test_a_url_names_a_dict_a_prefix_and_an_environment() -> None:
    assert parse_url("modal://runs") == ("runs", "", "")
    assert parse_url("modal://my.runs/a/b?environment=dev") == ("my.runs", "a/b/", "dev")
    for wrong in ("modal://", "modal://a b", "modal://" + "x" * 65, "modal://runs?region=eu", "modal://runs/../other"):
        with pytest.raises((ValueError, RuntimeError)):
            parse_url(wrong)
    assert open_store("modal://runs/first").url == "modal://runs/first"


def test_it_lies_in_the_environment_of_the_client(server: ModalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: MODAL_ENVIRONMENT was passed over, and the run lay beside its own containers' environment."""
    monkeypatch.setenv("MODAL_ENVIRONMENT", "dev")
    open_store("modal://here/x").get("a")
    assert server.asked_in == {"dev"}
    open_store("modal://there/x?environment=main").get("a")
    assert server.asked_in == {"dev", "main"}


def test_two_prefixes_of_one_name_do_not_see_each_other(server: ModalServer) -> None:
    one, other = open_store("modal://runs/one"), open_store("modal://runs/two")
    one.put("k", b"1")
    assert other.get("k") is None and other.list("") == [] and one.list("") == ["k"]


def test_a_large_body_is_cut_into_blocks_that_are_sent_once(server: ModalServer, store: Store) -> None:
    body = bytes(range(256)) * (3 * BLOCK // 256) + b"end"
    store.put("blob", body)
    assert server.block_requests["PUT"] == 2  # three equal blocks and the end
    out = bytearray(BLOCK + 2)
    assert store.get_into("blob", memoryview(out), 5) and out == body[5 : BLOCK + 7]
    store.put("blob", body)
    assert server.block_requests["PUT"] == 2  # nothing was missing


def test_zeros_at_the_end_of_a_block_are_not_sent_and_come_back(server: ModalServer, store: Store) -> None:
    body = b"begin" + bytes(2 * BLOCK)
    store.put("blob", body)
    assert sum(map(len, server.blocks.values())) == 5 and store.get("blob") == body
    out = bytearray(b"x" * 10)
    assert store.get_into("blob", memoryview(out), BLOCK - 5) and out == bytes(10)


def test_a_stream_is_the_same_as_its_bytes(server: ModalServer, store: Store) -> None:
    class Pieces:
        size = len(BIG)

        def __iter__(self) -> Iterator[bytes]:
            return (BIG[i : i + 1_000_003] for i in range(0, len(BIG), 1_000_003))

        def __bytes__(self) -> bytes:
            return BIG

    store.put("k", Pieces())
    assert store.get("k") == BIG


def test_blocks_are_those_of_modals_own_client(tmp_path: Path) -> None:
    import asyncio
    from pathlib import PurePosixPath

    from modal._utils.blob_utils import FileUploadSpec2

    body = BIG + bytes(BLOCK) + b"tail\0\0"
    (tmp_path / "file").write_bytes(body)
    theirs = asyncio.run(
        FileUploadSpec2.from_path(tmp_path / "file", PurePosixPath("x"), asyncio.Semaphore(1))  # type: ignore[arg-type]
    )
    pieces = [memoryview(body)[i : i + 700_001] for i in range(0, len(body), 700_001)]
    assert [b.sha256 for b in blocks_of(pieces)] == [b.contents_sha256 for b in theirs.blocks]


def test_the_public_client_reads_what_we_wrote(server: ModalServer, store: Store) -> None:
    import modal

    store.put("k", b"body")
    entries = modal.Dict.from_name("runs")
    assert entries.get("first/k") == b"=body"


# ---------------------------------------------------------------------- bad days


def test_put_once_knows_who_won_when_the_answer_is_lost(server: ModalServer, store: Store) -> None:
    store.get("k")  # opened
    server.faults.append(("DictUpdate", "lose", None))
    assert put_once(store, SystemClock(), "k", b"mine") == (True, b"mine")
    with pytest.raises(KeyExists):
        store.create("k", b"other")


def test_a_lost_or_refused_answer_is_unclear_and_nothing_is_asked_twice(server: ModalServer, store: Store) -> None:
    store.get("k")
    for fault in (("DictUpdate", "lose", None), ("DictUpdate", "refuse", Status.INTERNAL)):
        before = server.requests["DictUpdate"]
        server.faults.append(fault)
        with pytest.raises(StoreUnclear, match="DictUpdate on runs"):
            store.create(f"k{fault[1]}", b"1")
        assert server.requests["DictUpdate"] == before + 1


@pytest.mark.parametrize("fault", ["503", "cut"])
def test_a_block_that_does_not_arrive_is_unclear_and_nothing_is_seen(
    server: ModalServer, store: Store, fault: str
) -> None:
    store.put("old", BIG)
    server.block_faults = [fault]
    with pytest.raises(StoreUnclear):
        store.get("old")
    server.block_faults = ["503"]
    with pytest.raises(StoreUnclear, match="HTTP 503"):
        store.put("old", BIG[::-1])
    assert store.get("old") == BIG and store.get("new") is None


def test_a_block_with_too_many_bytes_is_not_taken(server: ModalServer, store: Store) -> None:
    store.put("k", BIG)
    server.block_faults = ["long"]
    with pytest.raises(StoreUnclear, match="bytes"):
        store.get("k")


def test_a_user_without_a_token_hears_what_to_do(server: ModalServer, store: Store) -> None:
    server.token = "another"
    with pytest.raises(StoreRefused, match="modal token new"):
        store.get("k")


def test_an_entry_whose_file_is_gone_is_not_there(server: ModalServer, store: Store) -> None:
    store.put("k", BIG)
    for _, _, files in server.volumes.values():
        files.clear()
    assert store.get("k") is None and not store.get_into("k", memoryview(bytearray(5)))


def test_a_volume_of_version_one_is_refused(server: ModalServer) -> None:
    server.volumes["vo-1"] = ("old", 1, {})
    with pytest.raises(StoreRefused, match="version 1"):
        open_store("modal://old").get("k")


# ---------------------------------------------------------------------- who may write may not run code


class _Runs:
    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return _Runs.ran.append, (1,)


def test_a_foreign_pickle_is_refused_and_not_run(server: ModalServer, store: Store) -> None:
    store.put("k", b"1")
    (_, entries), *_ = server.dicts.values()
    for value in (_Runs(), [1, 2], "text", 5, None):
        entries[pickle.dumps("first/k", 4)] = pickle.dumps(value, 4)
        with pytest.raises(StoreRefused, match="modal://OTHER"):
            store.get("k")
    entries[pickle.dumps("first/k", 4)] = b"no pickle"
    with pytest.raises(StoreRefused):
        store.get("k")
    entries[pickle.dumps(_Runs(), 4)] = b""
    assert store.list("") == ["k"] and not _Runs.ran


@pytest.mark.parametrize("path", ["/etc/passwd", "obj/../../x", "mirror/first/k", ""])
def test_a_pointer_leads_to_the_runs_files_only(server: ModalServer, store: Store, path: str) -> None:
    store.put("k", b"1")
    (_, entries), *_ = server.dicts.values()
    entries[pickle.dumps("first/k", 4)] = pickle.dumps(pointer_to(path, 5), 4)
    with pytest.raises(StoreRefused, match="was not written by a run"):
        store.get("k")


# ---------------------------------------------------------------------- seven days


def test_a_register_that_expired_stands_again_before_anybody_asks(
    server: ModalServer, fresh: Callable[[], ModalStore]
) -> None:
    """Without the mirror another process would have won it a second time."""
    first = fresh()
    assert put_once(first, SystemClock(), "steps/7/commit", b"ours")[0]
    first.put("beat", b"1")  # the register is mirrored before the next write, of any kind
    server.ahead_s = 8 * DAY
    later = fresh()
    assert put_once(later, SystemClock(), "steps/7/commit", b"theirs") == (False, b"ours")


def test_blobs_of_every_size_outlive_the_seven_days(server: ModalServer, fresh: Callable[[], ModalStore]) -> None:
    """Entries that only point to a file of the volume, and small bodies, had expired with everything else."""
    first = fresh()
    first.put("large", BIG)
    first.put("small", b"config")
    first.create("offer", b"points to both")
    server.ahead_s = 8 * DAY
    later = fresh()
    assert (later.get("large"), later.get("small"), later.get("offer")) == (BIG, b"config", None)
    first.delete(["large", "small"])
    server.ahead_s = 16 * DAY
    assert fresh().get("large") is None and fresh().get("small") is None


def test_a_process_that_slept_for_a_week_meets_what_was_decided(
    server: ModalServer, fresh: Callable[[], ModalStore]
) -> None:
    zombie, other = fresh(), fresh()
    assert zombie.get("commit") is None
    assert put_once(other, SystemClock(), "commit", b"decided")[0]
    other.put("beat", b"1")
    server.ahead_s = 8 * DAY
    assert put_once(zombie, SystemClock(), "commit", b"late") == (False, b"decided")


def test_a_reader_mirrors_a_register_before_it_writes(server: ModalServer, fresh: Callable[[], ModalStore]) -> None:
    """The winner was killed at once; what another process wrote afterwards may rest on it."""
    fresh().create("commit", b"ours")
    reader = fresh()
    assert reader.get("commit") == b"ours"
    reader.put("offer", b"rests on it")
    server.ahead_s = 8 * DAY
    assert fresh().get("commit") == b"ours"


def test_nothing_is_written_that_rests_on_a_register_without_a_mirror(
    server: ModalServer, fresh: Callable[[], ModalStore]
) -> None:
    reader = fresh()
    fresh().create("commit", b"ours")
    assert reader.get("commit") == b"ours"
    server.faults.append(("VolumePutFiles2", "refuse", Status.UNAVAILABLE))
    with pytest.raises(StoreUnclear):
        reader.put("offer", b"rests on it")
    assert fresh().get("offer") is None
    reader.put("offer", b"rests on it")


def test_a_run_that_is_looked_at_daily_keeps_every_register(
    server: ModalServer, fresh: Callable[[], ModalStore]
) -> None:
    first = fresh()
    first.create("old", b"1")
    first.put("x", b"")
    mirror = Mirror(Wire("runs"), "first/", Calendar(server).wall)
    for day in range(1, 15):
        server.ahead_s = day * DAY
        mirror.sweep()
    before = server.requests["VolumeGetFile2"]
    assert fresh().get("old") == b"1" and server.requests["VolumeGetFile2"] == before  # nothing had to be restored


def test_a_young_mark_costs_one_request(server: ModalServer, fresh: Callable[[], ModalStore]) -> None:
    fresh().put("k", b"1")
    before = server.requests["DictContents"], server.requests["DictGet"]
    assert fresh().get("k") == b"1"
    assert (server.requests["DictContents"], server.requests["DictGet"]) == (before[0], before[1] + 2)


def test_a_mark_from_the_future_is_not_believed(server: ModalServer, fresh: Callable[[], ModalStore]) -> None:
    store = fresh()
    store.create("commit", b"ours")
    store.put(KEPT, str(SystemClock().wall() + 300 * DAY).encode())
    server.ahead_s = 8 * DAY
    assert put_once(fresh(), SystemClock(), "commit", b"theirs") == (False, b"ours")


def test_a_register_that_differs_from_its_mirror_is_loud(server: ModalServer, fresh: Callable[[], ModalStore]) -> None:
    store = fresh()
    store.create("commit", b"ours")
    store.put("beat", b"1")
    (_, entries), *_ = server.dicts.values()
    key = pickle.dumps("first/commit", 4)
    del entries[key]
    mirror = Mirror(Wire("runs"), "first/")
    entries[key] = pickle.dumps(b"!theirs", 4)
    with pytest.raises(StoreRefused, match="decided twice"):
        mirror._restore_entry(("first/commit", b""))


def test_a_deleted_register_does_not_come_back(server: ModalServer, fresh: Callable[[], ModalStore]) -> None:
    """A run in which nothing was trained may be founded again."""
    store = fresh()
    store.create("run.json", b"1")
    store.put("x", b"")
    store.delete(["run.json"])
    server.ahead_s = 8 * DAY
    assert fresh().get("run.json") is None


@pytest.mark.slow
def test_sixteen_processes_restore_at_the_same_time(server: ModalServer, fresh: Callable[[], ModalStore]) -> None:
    store = fresh()
    for n in range(30):
        store.create(f"r{n}", b"%d" % n)
    store.put("x", b"")
    server.ahead_s = 8 * DAY
    seen, threads = list[Any](), list[threading.Thread]()
    for i in range(16):
        one = fresh()
        threads.append(
            threading.Thread(target=lambda one=one, i=i: seen.append(put_once(one, SystemClock(), "r7", b"x%d" % i)))
        )
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert seen == [(False, b"7")] * 16


# ---------------------------------------------------------------------- a run


def _bad_minutes(server: ModalServer, over: threading.Event) -> None:
    """Five times a second an answer is lost, a request refused, or a block cut off."""
    faults = ["DictUpdate", "DictGet", "VolumePutFiles2", "VolumeGetFile2", "DictContents"]
    for n in itertools.count():
        if over.wait(0.2):
            return
        server.faults = [(faults[n % 5], "lose" if n % 2 else "refuse", None)]
        server.block_faults = [("503", "cut")[n % 2]]


@pytest.mark.slow
def test_three_replicas_one_killed_and_replaced_among_lost_answers(platform: ModalPlatform, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"outer": {"sync_every": 20, "snapshot_every": 2}, "fleet": {"steps": 40}}
    fleet = Fleet(tmp_path, "modal://runs/fleet", platform.environ, **changes)
    over = threading.Event()
    trouble = threading.Thread(target=_bad_minutes, args=(platform.server, over))
    trouble.start()
    try:
        fleet.start_all()
        fleet.wait_for(lambda: (beat := fleet.beat("r01")) is not None and beat.step >= 2)  # in any phase
        fleet.signal("r01", signal.SIGKILL)
        fleet.start("r01")
        codes = fleet.wait(240)
    finally:
        over.set()
        trouble.join()
        platform.server.faults.clear()
        platform.server.block_faults.clear()
    assert codes == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    found = audited(fleet, 40)
    assert sum(slot == "r01" for _, slot in found.listed) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("die", ["after:create:/commit@1", "after:create:/offer/@2", "before:create:/commit@2"])
def test_all_die_and_a_week_later_the_run_goes_on_from_what_was_decided(
    platform: ModalPlatform, tmp_path: Path, die: str
) -> None:
    """A winner that dies at once has mirrored nothing; who read its commit has, before it wrote anything else."""
    fleet = Fleet(tmp_path, "modal://runs/week", platform.environ, outer={"sync_every": 4, "snapshot_every": 2})
    for slot in ("r00", "r01", "r02"):
        fleet.start(slot, die=die)
    # a replica has read commit 0, and written something after that
    fleet.wait_for(lambda: fleet.store.list(f"steps/{1:010d}/offer/"))
    fleet.kill_all()
    before = [commit.encode() for commit in fleet.commits()]
    platform.server.ahead_s = 8 * DAY
    fleet.store = PatientStore(ModalStore("modal://runs/week", Calendar(platform.server)), SystemClock(), 10.0)
    assert [commit.encode() for commit in fleet.commits()] == before
    for slot in ("r00", "r01", "r02"):
        fleet.start(slot)
    codes = fleet.wait(240)
    assert [lives[-1] for lives in codes.values()] == [0, 0, 0], fleet.logs()
    assert [commit.encode() for commit in fleet.commits()][: len(before)] == before
    audited(fleet, 6)


def test_a_missing_token_is_said_in_one_sentence_with_what_to_run() -> None:
    from modal.exception import AuthError

    long = "Token missing. Could not authenticate client. If you are a new user, register, then run `modal token new`."
    said = str(explain_error("Dict.get", AuthError(long)))
    assert said == (
        "Modal does not know who you are (Token missing). Run `modal token new`, or set MODAL_TOKEN_ID and "
        "MODAL_TOKEN_SECRET"
    )


def test_the_url_of_a_store_has_its_environment() -> None:
    assert ModalStore("modal://runs/first/?environment=dev").url == "modal://runs/first?environment=dev"
    assert ModalStore("modal://runs").url == "modal://runs"
