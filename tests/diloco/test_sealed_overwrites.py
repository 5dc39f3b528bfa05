"""A run under a key, and a writer without it that overwrites any object in the bucket.

    every object of one kind ── overwritten the moment it was written ──▶ θ is the clean run's at every step,
                                                                          or its reader ends loudly, or is told
    no foreign code runs, in any case                                     (xxh3-128 is no help: second_preimage.py)

The kinds are those that rendezvous/layout.py can spell: a new one without a row here fails.
"""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from diloco.model.fetch import fetch_files, fetch_model
from diloco.model.traces import run_states
from diloco.process import exitcodes
from diloco.process.journal import Journal
from diloco.run.founding import open_run
from diloco.run.library import agree_on_run
from diloco.run.record import ModelRecord, Run, RunRecord, read_run
from diloco.run.script import Script, ScriptConfig
from diloco.runlog.reader import read_report
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import Corrupt, Forged, RendezvousError, WrongRun
from rendezvous.records.digests import SHA256, digest, hex_of
from rendezvous.records.records import Beat
from rendezvous.store import Buffer, Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.run_key import under_key
from rendezvous.stores.signed import SignedStore, sign_record
from tests.rendezvous.test_engine import TIMING
from tests.support.fakes import ManualClock, VectorState
from tests.support.fleet import Fleet
from tests.support.scripted import scripted_task
from tests.support.second_preimage import forged

SECRET = b"a key that nobody guesses"
N = 2000  # elements: 8 kB, enough for a made collision

# how layout spells it -> what its keys look like, and how a run meets it that reads it overwritten
ENDS, GOES_ON, TOLD = "whoever reads it ends", "nothing changes", "as after a kill -9, and it is told"
OBJECTS: dict[str, tuple[str, str]] = {
    "SEAL": (r"seal\.json", ENDS), "claim_key": (r"replicas/.*", ENDS), "beat_key": (r"alive/.*", GOES_ON),
    "delta_blob": (r"steps/.*/delta/.*", ENDS), "offer_key": (r"steps/.*/offer/.*", ENDS),
    "commit_key": (r".*/commit\.json", ENDS),
    "mean_key": (r"steps/.*/mean/\d{4}\.json", ENDS), "mean_blob": (r"steps/.*/mean/.*\.bin", GOES_ON),
    "snapshot_key": (r"snapshots/.*\.json", ENDS), "snapshot_blob": (r"snapshots/.*\.safetensors", ENDS),
    "leave_key": (r"leave/.*", TOLD), "residual_blob": (r"residuals/.*", TOLD), "control_key": (r"control/.*", ENDS),
}  # fmt: skip
LAUNCHED = {
    "RUN",
    "SCRIPT",
    "MODEL_MANIFEST",
    "code_key",
    "model_file",
    "log_key",
    "rollouts_key",
    "page_data_key",
    "weights_key",
    "weights_blob",
    "bundle_key",  # test_recorded_fleet.py: under a run key another writer's bundle is nothing
    "beside_bundle",  # test_door.py: the same of a verdict; test_late_rewards.py: of a reward
}  # below, each in a test of its own


def test_every_kind_of_object_is_overwritten_somewhere_below() -> None:
    spelled = {name for name, f in vars(layout).items() if inspect.isfunction(f) and f.__annotations__["return"] is str}
    singles = {name for name, key in vars(layout).items() if isinstance(key, str) and key.endswith(".json")}
    assert spelled | singles == set(OBJECTS) | LAUNCHED | {
        "slot_name",
        "actor_name",
        "logs_prefix",
        "offers_prefix",
        "offer_slot",
    }


class Overwritten(MemoryStore):
    """Every object written under some keys is overwritten at once, by the result of `by`."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.hits, self.written = re.compile("(?!)"), 0, dict[str, bytes]()
        self.by: Callable[[Overwritten, str, bytes], bytes] = lambda store, key, body: body

    def put(self, key: str, body: Buffer) -> None:
        super().put(key, body)
        self._strike(key)

    def create(self, key: str, body: Buffer) -> None:
        super().create(key, body)
        self._strike(key)

    def _strike(self, key: str) -> None:
        body = self._objects[key]
        if self.keys.fullmatch(key):
            self._objects[key] = self.by(self, key, body)
            self.hits += self._objects[key] != body
        self.written[key] = body


def garbage(store: Overwritten, key: str, body: bytes) -> bytes:
    return b"\x93garbage"


def emptied(store: Overwritten, key: str, body: bytes) -> bytes:
    return b""


def of_another_key(store: Overwritten, key: str, body: bytes) -> bytes:
    """Well-formed, as the outsider's own run would have it there."""
    return (
        sign_record(body[:-75] + b"}", b"the outsider's own key", "run", key) if layout.record_kind(key) else body[::-1]
    )


def of_another_place(store: Overwritten, key: str, body: bytes) -> bytes:
    """The run's own, of the same kind, under another key; of a blob the first that there was."""
    alike = [
        k
        for k in store.written
        if layout.record_kind(k) == layout.record_kind(key) and k != key and store.keys.fullmatch(k)
    ]
    return store.written[alike[0]] if alike else b"{}"


def of_the_same_length(store: Overwritten, key: str, body: bytes) -> bytes:
    return bytes([body[0] ^ 1]) + body[1:] if body else body


def with_the_same_xxh3(store: Overwritten, key: str, body: bytes) -> bytes:
    """The decisive one: other bytes, same length, same xxh3-128.  Where a body is too short, its first bit."""
    if len(body) <= 1024:
        return of_the_same_length(store, key, body)
    other = forged(body, np.full(150, -7.0, np.float32).tobytes())
    assert other != body and xxhash.xxh3_128_digest(other) == xxhash.xxh3_128_digest(body)
    return other


ATTACKS = [garbage, emptied, of_another_key, of_another_place, of_the_same_length, with_the_same_xxh3]


class Game:
    """r00 and r01, two steps; r01 says goodbye and comes again, r02 joins: two steps more.   thetas: by step."""

    def __init__(self, bucket: Overwritten, codec: str, secret: bytes | None = SECRET) -> None:
        self.clock, self.thetas, self.told = ManualClock(), dict[int, set[bytes]](), list[str]()
        self.bucket, self.rules, self.secret = bucket, Rules(codec=codec, snapshot_every=2), secret

    def tell(self, event: str, **fields: Any) -> None:
        self.told.append(event)

    def play(self) -> "Game":
        write_control(self.opened(), self.clock, replicas=3, min_replicas=2, steps=4)
        a, b = self.seat("r00"), self.seat("r01")
        self.rounds(2, a, b)
        b.finish("asked to leave")
        b, c = self.seat("r01"), self.seat("r02")
        self.rounds(2, a, b, c)
        for seat in (a, b, c):
            seat.finish("done")
        return self

    def opened(self) -> Store:
        """As a process that starts now finds it."""
        store = under_key(self.bucket, self.clock, self.secret)
        if isinstance(store, SignedStore):
            store.emit = self.tell
        return store

    def seat(self, slot: str) -> Rendezvous:
        seat = Rendezvous(self.opened(), self.clock, slot, self.rules, TIMING, emit=self.tell)
        seat.claim()
        seat.join(VectorState(N, 100.0))
        self.saw(seat)
        return seat

    def rounds(self, count: int, *seats: Rendezvous) -> None:
        for _ in range(count):
            for i, seat in enumerate(seats):
                seat.members.tick()
                seat.offer(np.linspace(0.1, 1 + i + seat.step, N, dtype=np.float32), 2)
            for seat in seats:
                commit, mean = seat.settle(), np.empty(N, np.float32)
                seat.mean(commit, mean)
                seat.state.apply(0, mean)
                seat.advance(commit)
                self.saw(seat)

    def saw(self, seat: Rendezvous) -> None:
        self.thetas.setdefault(seat.step, set()).add(seat.state.theta.tobytes())  # type: ignore[attr-defined]


def played(kind: str, by: Any, secret: bytes | None = SECRET) -> tuple[Game, str]:
    """-> the game under attack, and what ended it."""
    bucket = Overwritten()
    game = Game(bucket, "int8" if kind in ("leave_key", "residual_blob") else "fp32", secret)
    bucket.keys, bucket.by = re.compile(OBJECTS[kind][0]), by
    try:
        game.play()
    except RendezvousError as error:
        return game, f"{type(error).__name__}: {error}"
    return game, ""


@pytest.mark.parametrize("by", ATTACKS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", OBJECTS)
def test_overwriting_what_lies_there_never_changes_theta_unnoticed(kind: str, by: Any) -> None:
    clean = Game(Overwritten(), "int8" if kind in ("leave_key", "residual_blob") else "fp32").play()
    assert set(clean.thetas) == {0, 1, 2, 3, 4} and all(len(t) == 1 for t in clean.thetas.values())
    game, end = played(kind, by)
    assert game.bucket.hits > 0, "the attack happened"
    how = OBJECTS[kind][1]
    if how == TOLD:
        assert not end and {"forged", "bad_residual"} & set(game.told)
        assert all(len(t) == 1 for t in game.thetas.values()), "one θ, if another one than with the residual"
        return
    for step, thetas in game.thetas.items():
        assert thetas == clean.thetas[step], f"another θ after step {step}"
    if how == GOES_ON:
        assert not end and set(game.thetas) == set(clean.thetas)
    else:
        assert end and len(end) > 60, f"{how}: {end}"


def test_without_a_key_a_made_collision_counts() -> None:
    """So the attack is real: the outsider's values are averaged, and no digest says a word."""
    game, _ = played("delta_blob", with_the_same_xxh3, secret=None)
    clean = Game(Overwritten(), "fp32", secret=None).play()
    assert game.thetas[1] != clean.thetas[1] and "bad_blob" not in game.told


def test_an_old_beat_that_is_put_back_is_silence(tmp_path: Path) -> None:
    """No replica is kept alive by recordings, and none that left speaks again."""
    clock, bucket = ManualClock(), MemoryStore()
    store = under_key(bucket, clock, SECRET)
    write_control(store, clock, replicas=2, min_replicas=2, steps=9)
    a, b = (Rendezvous(store, clock, slot, Rules(), TIMING) for slot in ("r00", "r01"))
    a.claim(), b.claim()
    recorded = []
    for _ in range(3):
        b.members.tick()
        recorded.append(bucket.get(layout.beat_key("r01")) or b"")
        a.members.tick()
        clock.sleep(TIMING.beat)
    for i in range(40):
        bucket.put(layout.beat_key("r01"), recorded[i % 3])
        clock.sleep(TIMING.beat)
        a.members.tick()
    assert a.members.peers["r01"].is_dead(TIMING.dead_after)


def test_a_forged_beat_neither_fences_nor_drains_nor_stops_nor_lowers_the_quorum() -> None:
    clock, bucket = ManualClock(), MemoryStore()
    store = under_key(bucket, clock, SECRET)
    write_control(store, clock, replicas=2, min_replicas=2, steps=9, until=7.0)
    a = Rendezvous(store, clock, "r00", Rules(), TIMING)
    a.claim()
    before = a.members.hear_control(store)
    for slot in ("r00", "r01", "supervisor"):
        for phase in ("left", "train", "boot"):
            bucket.put(layout.beat_key(slot), Beat(slot, 99, 99, phase, 99, 0, 1.0, 0.0).encode())
            a.members.tick()
    assert a.members.wanted == before and a.members.fenced_by == 0 and not a.is_leaving
    assert "r01" not in a.members.peers, "nobody heard it"


# ---------------------------------------------------------------------- what a launch writes

REWARD = b"".join(b"# line %04d: what this reward is for, in many words that nobody reads\n" % i for i in range(40))
REWARD += b"def reward(completions, **_):\n    return [float(len(c)) for c in completions]\n"


def foreign(sentinel: Path) -> bytes:
    """The reward file's twin: same length, same xxh3-128; it runs foreign code, and then rewards as before."""
    head = f"# -*- coding: latin-1 -*-\nimport pathlib\npathlib.Path({str(sentinel)!r}).touch()\n#".encode()
    return forged(REWARD, head, avoid=b"\0\n\r")


def test_the_twin_of_a_reward_file_is_real(tmp_path: Path) -> None:
    """A file that xxh3-128 alone would have let through: it runs, and no check would see a difference."""
    body = foreign(tmp_path / "sentinel")
    assert body != REWARD and xxhash.xxh3_128_digest(body) == xxhash.xxh3_128_digest(REWARD)
    names: dict[str, Any] = {}
    exec(compile(body, "reward.py", "exec"), names)
    assert (tmp_path / "sentinel").exists() and names["reward"](["abc"]) == [3.0]


@pytest.mark.parametrize("secret", [SECRET, None])
def test_no_code_but_the_users_is_ever_written_to_be_imported(tmp_path: Path, secret: bytes | None) -> None:
    store = under_key(bucket := MemoryStore(), ManualClock(), secret)
    key = layout.code_key(hex_of(digest(REWARD, SHA256)), "reward.py")
    record = RunRecord({}, {}, {"reward": {"key": key, "digest": digest(REWARD, SHA256)}}, "n", 0.0)
    run = Run("memory://", store, record)
    bucket.put(key, REWARD)
    assert fetch_files(run, tmp_path / "a")["reward"].read_bytes() == REWARD
    for body in (foreign(tmp_path / "sentinel"), b"", REWARD[:-1], b"import os"):
        bucket.put(key, body)
        with pytest.raises(Corrupt, match="Restore it, or start a new run"):
            fetch_files(run, tmp_path / "b")
    assert [p for p in (tmp_path / "b").rglob("*") if p.is_file()] == []


def test_no_outer_settings_but_the_replicas_of_a_launched_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_RUN_KEY", 2 * SECRET.decode())
    script = tmp_path / "train.py"
    script.write_text("")
    config = ScriptConfig(name="train", own_script=Script("train.py"), files={"train.py": script})
    run = open_run(config, f"file://{tmp_path}/run", SystemClock())
    agree_on_run(run.store, SystemClock(), {"sync_every": 7, "codec": "fp32"}, [["w", [2], "float32"]])
    assert read_run(run.url).config.outer.sync_every == 7
    path = tmp_path / "run" / layout.SCRIPT
    path.write_bytes(path.read_bytes().replace(b'"sync_every":7', b'"sync_every":9'))
    with pytest.raises(Forged, match="was not written with this run's key"):
        read_run(run.url)


@pytest.mark.parametrize("secret", [SECRET, None])
def test_no_model_file_but_the_publishers_is_loaded(tmp_path: Path, secret: bytes | None) -> None:
    store, body = under_key(bucket := MemoryStore(), ManualClock(), secret), np.arange(900.0).tobytes()
    record = ModelRecord({"w.bin": {"key": "model/n/w.bin", "digest": digest(body, SHA256)}}, [], "n", 0.0)
    bucket.put("model/n/w.bin", forged(body, b"theirs"))
    with pytest.raises(Corrupt):
        fetch_model(store, record, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_changes_between_the_check_and_its_use_is_used_as_checked(tmp_path: Path) -> None:
    """The bytes that were checked are the bytes that are written: there is no second read to be late for."""

    class Fickle(MemoryStore):
        def get(self, key: str) -> bytes | None:
            body = super().get(key)
            self._objects[key] = b"import os  # foreign"
            return body

    store = Fickle()
    store._objects["model/n/x"] = b"ours"
    record = ModelRecord({"x": {"key": "model/n/x", "digest": digest(b"ours", SHA256)}}, [], "n", 0.0)
    assert (fetch_model(store, record, tmp_path) / "x").read_bytes() == b"ours"


LOG = b'{"at": 1, "event": "launched", "slot": "r00", "attempt": 1, "handle": {"pid": 1}}\n'


@pytest.mark.parametrize("theirs", [LOG, b"{}\n", b"", b"\x93", LOG + b'{"seal":"' + b"0" * 64 + b'"}\n'])
def test_a_forged_log_tells_nothing(theirs: bytes) -> None:
    """`diloco stop` ends what the log says was launched: an outsider's line must not name a process."""
    clock, bucket = ManualClock(), MemoryStore()
    store = under_key(bucket, clock, SECRET)
    write_control(store, clock, replicas=1, min_replicas=1)
    journal = Journal(store, clock, "supervisor", 1)
    journal.emit("launched", slot="r00")
    journal.flush()
    assert [e["event"] for e in read_report(store).events] == ["launched"]
    for key in (layout.log_key("supervisor", 1, 0), layout.log_key("r07", 1, 3)):
        bucket.put(key, theirs)
    assert read_report(store).events == []


def test_forged_rollouts_are_no_traces() -> None:
    clock, bucket = ManualClock(), MemoryStore()
    store = under_key(bucket, clock, SECRET)
    bucket.put(layout.rollouts_key("r00", 1, 0), b'{"step": 1}\n{"reward": 9, "messages": []}\n')
    assert list(run_states(store)) == []


def test_a_page_that_somebody_else_wrote_is_read_by_nobody() -> None:
    clock, bucket = ManualClock(), MemoryStore()
    store = under_key(bucket, clock, SECRET)
    write_control(store, clock, replicas=1, min_replicas=1)
    before = read_report(store)
    for key in (layout.PAGE_INDEX, layout.page_data_key("head.json"), layout.page_data_key("0.json")):
        bucket.put(key, b"<script>")
    after = read_report(store)
    assert (after, after.damage) == (before, "")


def test_what_a_log_says_cannot_steer_a_terminal() -> None:
    clock, store = ManualClock(), MemoryStore()
    write_control(store, clock, replicas=1, min_replicas=1)
    journal = Journal(store, clock, "r00", 1)
    journal.emit("warning", text="\x1b[2J\x1b]0;owned\x07 all is well\nr01-1 done\u202e", deep={"a": ["\x1b[31m"]})
    journal.flush()
    store.put(
        layout.beat_key("r00"), Beat("r00", 1, 1, "train", 0, 0, 0.0, 0.0, note="\x1b[1A\x9b", host="h\x1b").encode()
    )
    report = read_report(store)
    said = repr([report.events, [(b.note, b.host) for b in report.beats.values()]])
    assert "all is well" in said
    assert not re.search(r"\\x1b|\\x07|\\x9b|\\u202e|\\n", said)


@pytest.mark.parametrize("kind", ["RUN", "MODEL_MANIFEST", "SEAL"])
def test_real_replicas_end_loudly_when_a_manifest_was_overwritten(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_RUN_KEY", SECRET.decode())
    fleet = Fleet(tmp_path, environ={"DILOCO_RUN_KEY": SECRET.decode()}, fleet={"replicas": 1, "steps": 1})
    bucket = FileStore(tmp_path / "run")
    body = bucket.get(getattr(layout, kind)) or b""
    bucket.put(getattr(layout, kind), body.replace(b'"nonce":"', b'"nonce":"0'))
    fleet.start("r00")
    assert fleet.wait() == {"r00": [exitcodes.USER_ERROR]}, fleet.logs()
    assert fleet.log("r00").read_text().count("Traceback") == 0
    if kind != "MODEL_MANIFEST":
        with pytest.raises((Forged, WrongRun)):
            read_run(str(tmp_path / "run"))


def test_three_real_replicas_take_no_user_file_but_the_launchers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DILOCO_RUN_KEY", SECRET.decode())
    fleet = Fleet(tmp_path, environ={"DILOCO_RUN_KEY": SECRET.decode()}, fleet={"steps": 1})
    bucket = FileStore(tmp_path / "run")
    (key,) = bucket.list("code/")
    body = bucket.get(key) or b""
    bucket.put(key, forged(body, b"foreign text"))
    fleet.start_all()
    codes = fleet.wait()
    assert all(code != 0 for (code,) in codes.values()), fleet.logs()
    assert fleet.commits() == [] and "Restore it" in fleet.log("r00").read_text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_twin_of_a_running_fleets_reward_file_never_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real GRPO replica, a step; the outsider swaps the reward file in the bucket; the next life starts."""
    monkeypatch.setenv("DILOCO_RUN_KEY", SECRET.decode())
    task, sentinel = scripted_task(tmp_path, "qwen3"), tmp_path / "sentinel"
    (tmp_path / "reward.py").write_bytes(REWARD)
    fleet = Fleet(
        tmp_path, environ={"DILOCO_RUN_KEY": SECRET.decode(), "TEST_SCRIPTED": "1"}, inner=task,
        outer={"sync_every": 1, "snapshot_every": 1}, fleet={"replicas": 1, "steps": 3},
    )  # fmt: skip
    fleet.start("r00", die="after:create:/commit.json@1")
    assert fleet.wait(120.0) == {"r00": [-9]} and len(fleet.commits()) == 1, fleet.logs()
    bucket = FileStore(tmp_path / "run")
    (key,) = [key for key in bucket.list("code/") if key.endswith("/reward.py")]
    assert bucket.get(key) == REWARD
    bucket.put(key, foreign(sentinel))
    fleet.start("r00")
    assert fleet.wait(120.0)["r00"][1] != 0 and len(fleet.commits()) == 1, fleet.logs()
    assert not sentinel.exists(), "no foreign code ran"
    assert "Restore it" in fleet.log("r00").read_text()
    bucket.put(key, REWARD)
    fleet.start("r00")
    assert fleet.wait(120.0)["r00"][2] == 0 and len(fleet.commits()) == 3, fleet.logs()
