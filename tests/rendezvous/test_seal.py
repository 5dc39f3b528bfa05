"""A run under a key: an outsider's objects in its bucket are passed over, or end it loudly; they never count.

outsider ── record without, or with another, key ──▶ bucket        a, b: two replicas that share the key
"""

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from diloco.run.record import decode_run
from rendezvous import layout
from rendezvous.agreement.membership import claim, claims_above, read_control, write_control
from rendezvous.engine.allreduce import ObjectStoreAllReduce
from rendezvous.errors import Fenced, Forged, WrongRun
from rendezvous.records.records import Claim, Commit, Control, Leave, Offer, Record, Snapshot
from rendezvous.store import VOID, put_once
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.run_key import open_signed, run_key, under_key
from rendezvous.stores.signed import Seal, SignedStore, sign_record, verify_record
from tests.rendezvous.test_engine import Seat, together
from tests.support.fakes import ManualClock, unchecked

SECRET = b"a key that nobody guesses"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


class Sealed:
    """Two replicas under one key, and the bucket as an outsider sees it."""

    def __init__(self, clock: ManualClock, **wishes: Any) -> None:
        self.bucket, self.told = MemoryStore(), list[str]()
        self.store = under_key(self.bucket, clock, SECRET)
        assert isinstance(self.store, SignedStore)
        self.store.emit = lambda event, **fields: self.told.append(fields["key"])
        write_control(self.store, clock, **{"replicas": 2, "min_replicas": 2, "steps": 9, **wishes})
        self.a, self.b = Seat(self.store, "r00", clock).join(), Seat(self.store, "r01", clock).join()

    def record(self, key: str, kind: type[Record]) -> Any:
        """As a member reads it."""
        return kind.decode(self.store.get(key) or b"")

    def forge(self, key: str, record: Record) -> None:
        """An outsider's: well-formed, but without the key."""
        self.bucket.put(key, sign_record(unchecked(record), b"the outsider's own key", "", key))

    def offered(self, value: float, **fields: Any) -> Offer:
        """An outsider's offer for the open step in the place of r01, blob and all; `value` everywhere."""
        body = np.full(3, value, np.float32).tobytes()
        blob = layout.delta_blob(self.a.rv.step, "r01", 1, "outsider")
        self.bucket.put(blob, body)
        theirs = Offer(self.a.rv.step, "r01", 1, "n", self.a.rv.base, 2, blob, 12, xx(body), 1.0, 0.0, norm=1.0)
        return replace(theirs, **fields)


def xx(body: bytes) -> str:
    from rendezvous.records.digests import digest

    return digest(body)


# ---------------------------------------------------------------------- the tag


def test_a_tag_is_what_the_drawing_says() -> None:
    record = b'{"kind":"claim","wire":1}'
    body = sign_record(record, SECRET, "run", "replicas/r00/000001.json")
    tag = hmac.new(SECRET, b"run\0replicas/r00/000001.json\0" + record, hashlib.sha256).hexdigest()
    assert body == b'{"kind":"claim","wire":1,"seal":"' + tag.encode() + b'"}'
    assert json.loads(body)["kind"] == "claim", "people can read it without the key"


def test_only_the_same_record_at_the_same_place_in_the_same_run_under_the_same_key_opens() -> None:
    record = b'{"kind":"claim","wire":1}'
    body = sign_record(record, SECRET, "run", "k")
    assert verify_record(body, SECRET, "run", "k") == record
    others = [(b"another key, as long", "run", "k"), (SECRET, "run2", "k"), (SECRET, "run", "k2"), (SECRET, "runk", "")]
    assert [verify_record(body, *other) for other in others] == [None] * 4
    for at in range(len(body)):
        assert verify_record(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], SECRET, "run", "k") is None
        assert verify_record(body[:at], SECRET, "run", "k") is None
    assert verify_record(b"", SECRET, "run", "k") is None and verify_record(record, SECRET, "run", "k") is None
    assert verify_record(sign_record(body, SECRET, "run", "k"), SECRET, "run", "k") == body


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        (layout.SEAL, "seal"), (layout.RUN, "run"), (layout.MODEL_MANIFEST, "model"),
        (layout.claim_key("r00", 1), "claim"), (layout.claim_key("supervisor", 1), "claim"),
        (layout.offer_key(0, "r00", 0), "offer"),
        (layout.commit_key(7), "commit"), (layout.mean_key(7, 3), "mean"), (layout.snapshot_key(7), "snapshot"),
        (layout.leave_key("r00", 1), "leave"), (layout.control_key(0), "control"),
        (layout.beat_key("r00"), "beat"), (layout.residual_blob("r00", 1, "n"), None),
        (layout.delta_blob(0, "r00", 1, "n"), None),
        (layout.mean_blob(0, "n"), None),
        (layout.snapshot_blob(0, "n"), None), (layout.log_key("r00", 1, 0), "log"),
        (layout.bundle_key("r00", 1, 0, 0), "rollouts"), ("rollouts/r00/0000000042/0000.0.verdict", "verdict"),
        ("rollouts/r00/0000000042/0000.0.0003.human.reward", "reward"), ("control/x.reward", "control"),
        (layout.rollouts_key("r00", 1, 0), "log"), (layout.code_key("d", "a.json"), None),
        (layout.model_file("m/config.json"), None), ("probe/x.json", None),
    ],
)  # fmt: skip
def test_what_is_sealed(key: str, kind: str | None) -> None:
    assert layout.record_kind(key) == kind


def test_every_register_of_a_run_has_a_tag_and_nothing_else_has(clock: ManualClock) -> None:
    run = Sealed(clock)
    for _ in range(3):
        together(run.a, run.b)
    run.a.rv.finish("asked")
    identity = Seal.decode(verify_record(run.bucket.get(layout.SEAL) or b"", SECRET, "", layout.SEAL) or b"").nonce
    kinds = set[str]()
    for key in run.bucket.list(""):
        body = run.bucket.get(key) or b""
        where = "" if key == layout.SEAL else identity
        assert (verify_record(body, SECRET, where, key) is not None) == (layout.record_kind(key) is not None), key
        assert SECRET not in body
        kinds.add(layout.record_kind(key) or "")
    assert kinds >= {"seal", "claim", "offer", "commit", "mean", "snapshot", "leave", "control", ""}
    assert run.told == []


def test_a_log_has_its_tag_in_a_line_of_its_own() -> None:
    lines, key = b'{"at": 1}\n{"at": 2}\n', layout.log_key("r00", 1, 0)
    body = sign_record(lines, SECRET, "run", key)
    tag = hmac.new(SECRET, b"run\0" + key.encode() + b"\0" + lines, hashlib.sha256).hexdigest()
    assert body == lines + b'{"seal":"' + tag.encode() + b'"}\n' and verify_record(body, SECRET, "run", key) == lines
    for at in range(len(body)):
        assert verify_record(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :], SECRET, "run", key) is None
        assert verify_record(body[:at], SECRET, "run", key) is None
    assert verify_record(body[len(lines) // 2 :], SECRET, "run", key) is None, "no line can be cut off"
    assert verify_record(lines, SECRET, "run", key) is None


def test_put_once_compares_records_not_tags(clock: ManualClock) -> None:
    store = under_key(MemoryStore(), clock, SECRET)
    mine, theirs = b'{"kind":"control","nonce":"1"}', b'{"kind":"control","nonce":"2"}'
    assert put_once(store, clock, layout.control_key(0), mine) == (True, mine)
    assert put_once(store, clock, layout.control_key(0), mine) == (True, mine)
    assert put_once(store, clock, layout.control_key(0), theirs) == (False, mine)


# ---------------------------------------------------------------------- forged offers


@pytest.mark.parametrize("value", [float("nan"), 1e30, 7.0])
def test_a_forged_offer_does_not_count_and_does_not_block_the_slot(clock: ManualClock, value: float) -> None:
    run = Sealed(clock)
    run.forge(layout.offer_key(0, "r01", 0), run.offered(value))
    commit = together(run.a, run.b)
    assert [(o.slot, "outsider" not in o.blob) for o in commit.offers] == [("r00", True), ("r01", True)]
    assert run.bucket.get(layout.offer_key(0, "r01", 1)) is not None, "the next number was free"
    assert run.a.state.theta.tolist() == run.b.state.theta.tolist() == [98.5] * 3
    assert run.told == [layout.offer_key(0, "r01", 0)], "told once"


def test_a_forged_offer_of_a_silent_slot_does_not_make_a_quorum(clock: ManualClock) -> None:
    run = Sealed(clock)
    run.forge(layout.offer_key(0, "r01", 0), run.offered(1.0))
    run.a.offer()
    assert not run.a.rv.offers.has_offered("r01")
    run.b.offer()
    assert run.a.step().fresh_offers[1].blob != "steps/outsider.bin"


def test_a_true_offer_is_worth_nothing_in_another_place(clock: ManualClock) -> None:
    """r01's own offer of step 0, copied to step 1, to attempt 1, and to another slot."""
    run = Sealed(clock, replicas=3)
    together(run.a, run.b)
    body = run.bucket.get(layout.offer_key(0, "r01", 0)) or b""
    places = [
        layout.offer_key(1, "r01", 0),
        layout.offer_key(1, "r00", 0),
        layout.offer_key(1, "r02", 0),
        layout.offer_key(0, "r02", 0),
    ]
    for key in places:
        run.bucket.put(key, body)
    assert [run.store.get(key) for key in places] == [VOID] * 4
    commit = together(run.a, run.b)
    assert [o.slot for o in commit.offers] == ["r00", "r01"] and commit.late_offers == ()


def test_a_record_of_another_run_under_the_same_key_is_worth_nothing(clock: ManualClock) -> None:
    run, other = Sealed(clock), Sealed(clock)
    other.b.offer(9, 9, 9)
    for key in other.bucket.list("steps/"):
        run.bucket.put(key, other.bucket.get(key) or b"")
    assert run.a.rv.base == other.a.rv.base, "but for the run, it would fit"
    together(run.a, run.b)
    assert run.a.state.theta.tolist() == [98.5] * 3 and run.told == [layout.offer_key(0, "r01", 0)]


# ---------------------------------------------------------------------- forged claims


def test_a_forged_claim_fences_nobody(clock: ManualClock) -> None:
    run = Sealed(clock)
    run.forge(layout.claim_key("r01", 2), Claim("r01", 2, "n", 0.0, "there", 1))
    for t in range(3):
        run.b.rv.members.tick()
        assert together(run.a, run.b).fence == {"r00": 1, "r01": 1}, t
    assert run.b.rv.members.fenced_by <= 1 and run.told == [layout.claim_key("r01", 2)]


def test_a_true_claim_behind_a_forged_one_fences(clock: ManualClock) -> None:
    run = Sealed(clock)
    run.forge(layout.claim_key("r01", 2), Claim("r01", 2, "n", 0.0))
    heir = Seat(run.store, "r01", clock).join()
    assert heir.rv.generation == 3
    run.b.rv.members.tick()
    with pytest.raises(Fenced, match="belongs to generation 3"):
        run.b.offer()
    assert together(run.a, heir).fence["r01"] == 3
    assert [c.generation for c in claims_above(run.store, "r01")] == [1, 3]


def test_a_forged_claim_in_the_same_moment_does_not_win(clock: ManualClock) -> None:
    """It is written between our look and our create: put_once finds it standing, and we take the next generation."""
    bucket = MemoryStore()
    store = under_key(bucket, clock, SECRET)
    create = bucket.create

    def late(key: str, body: Any) -> None:
        if key == layout.claim_key("r00", 1):
            bucket.put(key, b'{"kind":"claim"}')
        create(key, body)

    bucket.create = late  # type: ignore[method-assign]
    assert claim(store, clock, "r00") == 2


# ---------------------------------------------------------------------- forged decisions


def halted(run: Sealed, act: Callable[[], object], key: str) -> None:
    with pytest.raises(Forged) as caught:
        act()
    text = str(caught.value)
    assert key in text and "not written with this run's key" in text and "run the same command again" in text
    assert SECRET.decode() not in text


def test_a_forged_commit_ends_the_run_loudly(clock: ManualClock) -> None:
    run = Sealed(clock)
    together(run.a, run.b)
    commit = run.record(layout.commit_key(0), Commit)
    run.forge(layout.commit_key(1), replace(commit, t=1, prev=run.a.rv.chain.commit_digest(0), base=run.a.rv.base))
    run.a.offer()
    halted(run, run.a.rv.settle, layout.commit_key(1))
    run.b.rv.members.tick()
    assert run.b.rv.members.decided < 1, "a background tick believes it as little"
    assert run.a.state.theta.tolist() == [98.5] * 3
    halted(run, lambda: Seat(run.store, "r00", clock).join(), layout.commit_key(1))
    run.bucket.delete([layout.commit_key(1)])
    run.b.offer(1, 1, 1)
    assert run.b.step().t == 1 and Seat(run.store, "r00", clock).join().rv.step == 2, "what the message says helps"


def test_a_true_commit_of_another_step_ends_the_run_too(clock: ManualClock) -> None:
    run = Sealed(clock)
    together(run.a, run.b)
    run.bucket.put(layout.commit_key(1), run.bucket.get(layout.commit_key(0)) or b"")
    run.a.offer()
    halted(run, run.a.rv.settle, layout.commit_key(1))


def test_a_forged_snapshot_heals_nobody(clock: ManualClock) -> None:
    run = Sealed(clock, replicas=3)
    together(run.a, run.b)
    manifest = run.record(layout.snapshot_key(0), Snapshot)
    run.forge(layout.snapshot_key(1), replace(manifest, t=1))
    halted(run, lambda: Seat(run.store, "r02", clock).join(), layout.snapshot_key(1))


def test_a_forged_mean_is_not_applied(clock: ManualClock) -> None:
    run = Sealed(clock, replicas=3)
    together(run.a, run.b)
    key = layout.mean_key(0, 0)
    run.bucket.put(key, (run.bucket.get(key) or b"").replace(b'"t":0', b'"t":1'))
    halted(run, lambda: Seat(run.store, "r02", clock).join(), key)


# ---------------------------------------------------------------------- forged control and leave records


def test_an_outsider_can_neither_stop_the_run_nor_close_the_door(clock: ManualClock) -> None:
    run = Sealed(clock)
    run.forge(layout.control_key(1), Control(1, "n", 0.0, stop=True))
    run.a.rv.members.tick()
    assert not run.a.rv.wanted.stop and run.a.rv.wanted.records == 2
    assert write_control(run.store, clock, steps=7).steps == 7
    assert read_control(run.store).records == 3 and run.told == [layout.control_key(1)]
    together(run.a, run.b)


def test_a_forged_leave_record_confirms_no_snapshot(clock: ManualClock) -> None:
    run = Sealed(clock, steps=1)
    together(run.a, run.b)
    run.forge(layout.leave_key("r01", 1), Leave("r01", 1, 1, run.a.rv.base, "done", "n", 0.0))
    run.a.rv.finish("done")
    assert run.store.get(layout.snapshot_key(1)) is None and layout.leave_key("r01", 1) in run.told


# ---------------------------------------------------------------------- which key


def test_the_key_in_the_environment() -> None:
    assert run_key({}) is None and run_key({"DILOCO_RUN_KEY": " \n"}) is None
    assert run_key({"DILOCO_RUN_KEY": "0123456789abcdef\n"}) == b"0123456789abcdef"
    with pytest.raises(WrongRun, match=r"has 15 characters.*needs 16.*token_hex") as caught:
        run_key({"DILOCO_RUN_KEY": "0123456789abcde"})
    assert "0123456789abcde" not in str(caught.value)


def test_a_run_under_a_key_refuses_no_key_and_another(clock: ManualClock) -> None:
    bucket = Sealed(clock).bucket
    with pytest.raises(WrongRun, match=r"DILOCO_RUN_KEY is not set here\. Set it to the key"):
        under_key(bucket, clock, None)
    with pytest.raises(WrongRun, match="another run key than the one in DILOCO_RUN_KEY") as caught:
        under_key(bucket, clock, b"another key, as long as it")
    assert "another key, as long" not in str(caught.value)
    assert isinstance(under_key(bucket, clock, SECRET), SignedStore)


@pytest.mark.parametrize("first", [layout.RUN, layout.control_key(0), layout.claim_key("r00", 1), layout.commit_key(0)])
def test_a_run_without_a_key_refuses_one(clock: ManualClock, first: str) -> None:
    bucket = MemoryStore()
    bucket.put(first, b"{}")
    assert under_key(bucket, clock, None) is bucket
    with pytest.raises(WrongRun, match=r"without a run key.*Unset it"):
        under_key(bucket, clock, SECRET)
    assert bucket.list("") == [first]


def test_a_seal_that_was_swapped_is_refused(clock: ManualClock) -> None:
    run, other = Sealed(clock), Sealed(clock)
    run.bucket.put(layout.SEAL, b'{"kind":"seal","nonce":"x","wire":1}')
    with pytest.raises(WrongRun, match=r"seal.json was changed"):
        under_key(run.bucket, clock, SECRET)
    run.bucket.put(layout.SEAL, other.bucket.get(layout.SEAL) or b"")
    with pytest.raises(Forged):
        Seat(under_key(run.bucket, clock, SECRET), "r00", clock).join()


def test_a_store_is_sealed_once(clock: ManualClock) -> None:
    store = under_key(MemoryStore(), clock, SECRET)
    assert under_key(store, clock, SECRET) is store and store.near  # type: ignore[attr-defined]


def test_an_all_reduce_under_a_key(clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    monkeypatch.setenv("DILOCO_RUN_KEY", SECRET.decode())
    url = f"memory://{secrets.token_hex(8)}"
    ranks = [ObjectStoreAllReduce(url, i, 2, timeout_s=20.0) for i in range(2)]
    tensors = [np.full(5, float(i), np.float32) for i in range(2)]
    threads = [threading.Thread(target=r.allreduce, args=(t,)) for r, t in zip(ranks, tensors, strict=True)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert [t.tolist() for t in tensors] == [[0.5] * 5] * 2
    assert isinstance(open_signed(url), SignedStore)
    monkeypatch.delenv("DILOCO_RUN_KEY")
    with pytest.raises(WrongRun):
        ObjectStoreAllReduce(url, 0, 2).allreduce(np.ones(5, np.float32))


def test_a_seal_that_is_lost_is_said_and_the_key_is_not_to_be_unset(clock: ManualClock) -> None:
    """Before: "holds a run without a run key … Unset it to continue", which joins the run without any check."""
    store = MemoryStore()
    under_key(store, clock, SECRET).create(layout.RUN, b'{"name":"x"}')
    store.delete([layout.SEAL])
    with pytest.raises(WrongRun, match=r"whose seal.json is lost.*Restore that object"):
        under_key(store, clock, SECRET)
    with pytest.raises(WrongRun, match=r"whose seal.json is lost"):
        decode_run("memory://x", store.get(layout.RUN) or b"")
