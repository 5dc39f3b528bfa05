"""No name leads out of a run: not through a key, not through a record that names one, not through a link in the folder.

run/ ◀── every key          outside/ ── never read, written, listed or deleted from here
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.model.fetch import fetch_model
from diloco.run.record import ModelRecord, RunRecord
from rendezvous import layout
from rendezvous.engine import residuals
from rendezvous.errors import BadKey, RendezvousError, StoreRefused
from rendezvous.means.reduce import Reducer
from rendezvous.records.digests import SHA256, digest
from rendezvous.records.records import Commit, Leave, Listed, Mean, Offer, Record, Snapshot, WireError
from rendezvous.store import Store
from rendezvous.stores.adapter import AdapterStore
from rendezvous.stores.cloud.store import CloudStore
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import ManualClock, unchecked
from tests.support.s3_server import S3Server

LEADS_OUT = [
    "../outside/x",
    "a/../../outside/x",
    "..",
    "a/..",
    "",
    ".",
    "a//b",
    "a/./b",
    "a\\..\\b",
    "C:/x",
    "a\0b",
    "\ud800",
]
STORES: dict[str, Callable[[Path], Store]] = {
    "file": FileStore,
    "memory": lambda folder: MemoryStore(),
    "fsspec+file": lambda folder: AdapterStore(f"file://{folder}"),
    "s3": lambda folder: CloudStore("s3://bucket/prefix?endpoint=http://127.0.0.1:9"),
}


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_bytes(b"private")
    return tmp_path / "outside"


@pytest.mark.parametrize("key", [*LEADS_OUT, "ABSOLUTE"])
@pytest.mark.parametrize("name", STORES)
def test_no_verb_of_a_store_takes_a_key_that_leads_out(name: str, key: str, outside: Path) -> None:
    store = STORES[name](outside.parent / "run")
    key = str(outside / "x") if key == "ABSOLUTE" else key
    verbs: list[Callable[[], object]] = [
        lambda: store.put(key, b"theirs"), lambda: store.create(key, b"theirs"), lambda: store.get(key),
        lambda: store.get_into(key, memoryview(bytearray(2))), lambda: store.delete([key]),
    ]  # fmt: skip
    for verb in verbs:
        with pytest.raises(BadKey, match="not a key of a run"):
            verb()
    if key not in ("", "..", "."):  # those are the beginning of names
        with pytest.raises(BadKey):
            store.list(f"{key}/")
    assert (outside / "x").read_bytes() == b"private" and os.listdir(outside) == ["x"]


def test_percent_signs_mean_nothing_to_a_cloud_store(monkeypatch: pytest.MonkeyPatch) -> None:
    with S3Server() as s3:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        above, below = (CloudStore(f"s3://bucket{p}?endpoint={s3.endpoint}&region=us-east-1") for p in ("", "/run"))
        for key in ("%2e%2e/x", "a%2F..%2Fx", "..%2fx"):
            below.put(key, b"theirs")
            assert below.get(key) == b"theirs" and below.list("") == [key]
            assert above.list("") == [f"run/{key}"]
            below.delete([key])


@pytest.mark.parametrize("link", ["steps", "steps/0000000000", "steps/0000000000/commit.json"])
def test_a_link_in_the_runs_folder_is_not_followed(link: str, outside: Path) -> None:
    """A user with write access to a shared folder must not write with the rights of the user who runs a replica."""
    store, key = FileStore(outside.parent / "run"), layout.commit_key(0)
    to = outside if "json" not in link else outside / "x"
    (store.root / link).parent.mkdir(parents=True, exist_ok=True)
    (store.root / link).symlink_to(to)
    (outside / "0000000000").mkdir(exist_ok=True)
    (outside / "0000000000" / "commit.json").write_bytes(b"private")
    (outside / "commit.json").write_bytes(b"private")
    room = memoryview(bytearray(2))
    verbs: list[Callable[[], object]] = [lambda: store.get(key), lambda: store.get_into(key, room)]
    if "json" not in link:  # a link is replaced like a file, it is not written through
        verbs += [lambda: store.put(key, b"theirs"), lambda: store.create(key, b"theirs"), lambda: store.delete([key])]
        verbs += [lambda: store.list(f"{link}/")]
    for verb in verbs:
        with pytest.raises(StoreRefused, match=r"is a link.*Remove it"):
            verb()
    if "json" in link:
        store.put(key, b"ours")
        store.delete([key])
    assert {p.read_bytes() for p in outside.rglob("*") if p.is_file()} == {b"private"}


def test_the_folder_of_a_run_may_be_a_link(outside: Path) -> None:
    (outside.parent / "link").symlink_to(outside.parent / "run")
    store = FileStore(outside.parent / "link")
    store.put("a/b", b"1")
    assert store.get("a/b") == b"1" and store.list("a/") == ["a/b"] and (outside.parent / "run/a/b").exists()


# ---------------------------------------------------------------------- records that name objects

LISTED = Listed(3, "r01", 2, "n", layout.delta_blob(3, "r01", 2, "n"), 12, "d", 4, 1.0)
NAMING: dict[str, tuple[Record, str, Callable[[str], Record]]] = {
    "offer": (
        offer := Offer(3, "r01", 2, "n", "base", 4, LISTED.blob, 12, "d", 1.25, 9.0),
        layout.delta_blob(3, "r02", 2, "n"),
        lambda key: replace(offer, blob=key),
    ),
    "commit": (
        commit := Commit(3, "p", "base", (LISTED,), {"r01": 2}, 2, 1.5, 0, "r01-2", "n", 9.0),
        layout.delta_blob(2, "r01", 2, "n"),
        lambda key: replace(commit, offers=(replace(LISTED, blob=key),)),
    ),
    "mean": (
        mean := Mean(3, layout.mean_blob(3, "n"), 12, "d", "n"),
        layout.mean_blob(4, "n"),
        lambda key: replace(mean, blob=key),
    ),
    "snapshot": (
        snapshot := Snapshot(3, "base", None, layout.snapshot_blob(3, "n"), 12, "d", "n"),
        layout.snapshot_blob(4, "n"),
        lambda key: replace(snapshot, blob=key),
    ),
    "leave": (
        leave := Leave("r01", 2, 3, "b", "done", "n", 9.0, layout.residual_blob("r01", 2, "n"), "d"),
        layout.residual_blob("r01", 1, "n"),
        lambda key: replace(leave, residual=key),
    ),
}


@pytest.mark.parametrize("kind", NAMING)
def test_a_record_that_names_another_object_than_its_own_is_none(kind: str) -> None:
    record, anothers, naming = NAMING[kind]
    assert type(record).decode(record.encode()) == record
    own = record.residual if isinstance(record, Leave) else getattr(record, "blob", LISTED.blob)
    for key in (
        anothers,
        "run.json",
        "../x",
        "/etc/x",
        layout.commit_key(3),
        own.replace("/", "//"),
        f"{own}/../x.bin",
    ):
        with pytest.raises(WireError, match="its blob is called"):
            type(record).decode(unchecked(naming(key)))


def test_a_forged_leave_record_deletes_nothing_but_a_residual() -> None:
    """The heir deletes the residual it took: run.json, if the goodbye could name it."""
    store = MemoryStore()
    store.put(layout.RUN, b"{}")
    forged = replace(NAMING["leave"][0], residual=layout.RUN, residual_digest=digest(b"{}"))  # type: ignore[type-var]
    with pytest.raises(WireError):
        residuals.take_residuals(store, Leave.decode(forged.encode()))
    assert store.get(layout.RUN) == b"{}"


def test_a_forged_mean_puts_nothing_back_over_another_object() -> None:
    """A replica that finds an announced mean damaged puts it back, under the key that its record names."""
    store, clock = MemoryStore(), ManualClock()
    store.put(layout.RUN, b"{}")
    forged = Mean(0, layout.RUN, 0, digest(b""), "n")
    store.put(layout.mean_key(0, 0), unchecked(forged))
    import numpy as np

    empty = replace(NAMING["commit"][0], t=0, offers=(), prev=None)  # type: ignore[type-var]
    Reducer(store, clock, lambda event, **fields: None).mean(empty, np.empty(0, np.float32))  # it is not a record
    assert store.get(layout.RUN) == b"{}"


# ---------------------------------------------------------------------- manifests that name files

HEX = digest(b"theirs", SHA256)


def model_record(name: str, key: str = "model/n/x", sum_: str = HEX) -> ModelRecord:
    return ModelRecord({name: {"key": key, "digest": sum_}}, [["w", [1], "float32"]], "n", 0.0)


@pytest.mark.parametrize("name", [*LEADS_OUT, "/tmp/x", "a/../../x"])
def test_a_model_manifest_that_writes_elsewhere_is_none(name: str) -> None:
    assert ModelRecord.decode(model_record("vocab/merges.txt").encode()).files
    with pytest.raises(WireError):
        ModelRecord.decode(unchecked(model_record(name)))
    with pytest.raises(WireError):
        ModelRecord.decode(unchecked(model_record("config.json", key=name)))


@pytest.mark.parametrize(
    "key", ["run.json", "code/x/a", layout.MODEL_MANIFEST, layout.commit_key(0), "model/../run.json"]
)
def test_a_model_manifest_names_nothing_but_files_of_the_model(key: str) -> None:
    with pytest.raises(WireError):
        ModelRecord.decode(unchecked(model_record("config.json", key=key)))


OUTER = {"codec": "fp32"}


def run_record(key: str, sum_: str = HEX) -> RunRecord:
    return RunRecord({"outer": OUTER}, {"outer": OUTER}, {"reward": {"key": key, "digest": sum_}}, "n", 0.0)


@pytest.mark.parametrize(
    ("key", "sum_"),
    [
        ("code/x/reward.py", HEX), (f"code/{HEX[7:]}/..", HEX), (f"code/{HEX[7:]}/a/b", HEX),
        (f"code/{HEX[7:]}/reward.py", "sha256:../../../tmp"), ("code/../../x", "sha256:.."), ("run.json", HEX),
        (f"code/{HEX[7:]}/reward.py", digest(b"theirs")), (f"/code/{HEX[7:]}/reward.py", HEX),
    ],
)  # fmt: skip
def test_a_run_record_names_its_users_files_by_what_they_are(key: str, sum_: str) -> None:
    good = run_record(layout.code_key(HEX[7:], "my reward.py"))
    assert RunRecord.decode(good.encode()) == good
    with pytest.raises(WireError):
        RunRecord.decode(unchecked(run_record(key, sum_)))


def test_what_is_downloaded_stays_in_its_folder_also_where_links_lead(outside: Path) -> None:
    """A folder that was exported to before may hold links, the Hub's cache for one."""
    store, to = MemoryStore(), outside.parent / "to"
    store.put("model/n/x", b"theirs")
    to.mkdir()
    (to / "folder").symlink_to(outside)
    (to / "link").symlink_to(outside / "x")
    for name in ("folder/x", "link"):
        with pytest.raises(RendezvousError, match=r"leads out of .*to"):
            fetch_model(store, model_record(name), to)
    fetch_model(store, model_record("deep/x"), to)
    assert (to / "deep" / "x").read_bytes() == b"theirs" and (outside / "x").read_bytes() == b"private"
