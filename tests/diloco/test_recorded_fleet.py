"""Recorded rollouts in real fleets: a replacement trains on its predecessor's, and an audit takes the steps again."""

import json
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from diloco.audit.comparison import Holder, OfferComparison
from diloco.audit.inner import recompute_offers
from diloco.audit.verdict import Verdict
from diloco.model.late_rewards import give_reward
from diloco.model.traces import freeze, run_states
from diloco.process import data_position
from diloco.process.data_position import uncounted_sessions
from diloco.replica.old_bundles import OldBundles
from diloco.replica.rollouts import BucketPlaces, keep_rollouts, staleness_in
from diloco.run.combinations import prepared_for_actors
from diloco.run.config import RunConfig
from diloco.run.record import Parent, read_run
from diloco.run.sections import FleetConfig
from inner.errors import InnerError
from inner.replay.states import TraceWarning
from inner.rollouts.recording.bundle import RandomStates
from inner.rollouts.recording.recorded import BundlePlace
from inner.rollouts.recording.unpack import unpack
from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.background import Inline, no_emit
from rendezvous.clock import SystemClock
from rendezvous.errors import GaveUp, StoreFull, StoreRefused, StoreUnclear
from rendezvous.keeping.reach import Reach, read_reach
from rendezvous.records.records import Claim, Offer
from rendezvous.records.rollouts import read_record
from rendezvous.store import PatientStore, Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.run_key import under_key
from tests.diloco.test_channels_fleet import INNER, write_pairs
from tests.inner.test_recorded import a_bundle
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.fakes import ManualClock
from tests.support.fleet import Fleet

PLAIN = {name: value for name, value in INNER.items() if name not in ("sdpo", "replay")}


def a_fleet(folder: Path, inner: dict[str, Any] = PLAIN, **changes: Any) -> Fleet:
    folder.mkdir(exist_ok=True)
    sections: dict[str, Any] = {"outer": {"sync_every": 4}, "fleet": {"record_rollouts": True}}
    for name, table in changes.items():
        sections[name] = {**sections.get(name, {}), **table}
    sections["fleet"] = {"replicas": 2, "steps": 2, "min_replicas": 2, **sections["fleet"]}
    return Fleet(folder, inner=inner, **sections)


def offered(fleet: Fleet, slot: str, step: int) -> Offer:
    return Offer.decode(fleet.store.get(layout.offer_key(step, slot, 0)) or b"")


def events(fleet: Fleet, kind: str) -> list[dict[str, Any]]:
    lines = [line for path in sorted(Path(fleet.url).glob("log/r*/*.jsonl")) for line in path.read_text().splitlines()]
    return [event for event in map(json.loads, lines) if event.get("event") == kind]


def audited(fleet: Fleet) -> Any:
    return recompute_offers(read_run(fleet.url))


@pytest.mark.timeout(300)
def test_a_replica_killed_in_a_generation_is_replaced_in_the_same_bits(tmp_path: Path) -> None:
    """Killed before its third bundle: its replacement trains on two recorded ones, and makes the third as it would."""
    whole = a_fleet(tmp_path / "whole")
    whole.start_all()
    assert whole.wait() == {"r00": [0], "r01": [0]}, whole.logs()
    killed = a_fleet(tmp_path / "killed")
    killed.start("r00")
    killed.start("r01", die="before:create:.bundle@3").join()
    give_reward(read_run(killed.url), SystemClock(), "r01/0/0/0.0.3", -7.0, "late")  # nothing below may show it
    killed.start("r01")
    assert killed.wait() == {"r00": [0], "r01": [-9, 0]}, killed.logs()
    for slot in ("r00", "r01"):
        assert offered(killed, slot, 0).digest == offered(whole, slot, 0).digest
    assert offered(killed, "r01", 0).generation == 2 and events(killed, "rollouts_found")[0]["bundles"] == 2
    write_control(killed.store, SystemClock(), replicas=5)  # before: step 0 got the learning rate of 5 replicas
    found = audited(killed)
    assert (found.equal, found.off, found.unchecked, found.remade) == (4, [], [], 0)
    _the_first_control_record_gives_the_first_learning_rate(killed)
    bundles = sorted(Path(killed.url).glob("rollouts/*/*/*.bundle"))
    assert len(bundles) == 2 * 2 * 4
    _other_settings_give_others(killed)
    _frozen(killed, tmp_path / "traces.jsonl", 16 * len(bundles))
    _flip(bundles[0])
    again = audited(killed)
    assert [blob for _, blob, _, _ in again.off] == [bundles[0].relative_to(killed.url).as_posix()]
    assert "another digest" in again.off[0][3] and again.remade == 1
    first = bundles[1]
    shutil.copy(first, first.with_name("0000.1.bundle"))  # as if the session had refused a broken one before
    _flip(first)
    assert [blob for _, blob, _, _ in audited(killed).off] == [again.off[0][1]]
    last = bundles[7]
    body = last.read_bytes()
    at = body.rindex(b'"step":') + len('"step":')
    last.write_bytes(body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :])  # a bit of its record: step 0 in place of 1
    (_, found) = audited(killed).off
    assert found[1].endswith("/0000000007/0000.0.bundle") and "names outer step 0, and it was sampled on" in found[3]


def _the_first_control_record_gives_the_first_learning_rate(fleet: Fleet) -> None:
    """Before: if its writer's clock was ahead, or the record was gone, each session was accused."""
    record = Path(fleet.url, layout.control_key(0))
    written = record.read_text()
    record.write_text(re.sub(r'"at":[0-9.]+', '"at":9e9', written))
    assert (audited(fleet).equal, audited(fleet).off) == (4, [])
    record.unlink()
    found = audited(fleet)
    record.write_text(written)
    assert not found.off and all("control/000000.json, which says it, is gone" in text for text in found.unchecked)
    assert len(found.unchecked) == 4


def _other_settings_give_others(fleet: Fleet) -> None:
    """With another learning rate all differ; a session of another TRL is not accused, and none by a slower clock."""
    run = read_run(fleet.url)
    timed = {**run.record.config["outer"], "sync_seconds": 1e-6}
    found = recompute_offers(replace(run, record=replace(run.record, config={**run.record.config, "outer": timed})))
    assert (found.equal, found.off) == (4, []), "before, the audit's rounds ended after one inner step each"
    inner = {**run.record.config["inner"], "lr": 1e-2}
    run = replace(run, record=replace(run.record, config={**run.record.config, "inner": inner}))
    assert len(recompute_offers(run).off) == 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diloco.audit.comparison.library_versions", lambda: "trl 9.9, torch 1.0")
        found = recompute_offers(run)
    assert not found.off and len(found.unchecked) == 4
    assert "the session ran torch" in found.unchecked[0] and ", here 9.9. Check it with" in found.unchecked[0]
    log = Path(fleet.url, "log", "r00-1")
    told = {"event": "rollouts_lost", "at": time.time(), "slot": "r00", "generation": 1, "step": 1, "text": "no answer"}
    (added := log / f"{len(list(log.glob('*[0-9].jsonl'))):06d}.jsonl").write_text(json.dumps(told) + "\n")
    found_then = recompute_offers(run)
    added.unlink()
    assert sorted(name for _, _, name, _ in found_then.off) == ["r00-1", "r01-2", "r01-2"]
    assert [one for one in found_then.unchecked if "and in outer step 1, no answer" in one and "r00-1" in one]
    bundle = Path(fleet.url, "rollouts/r01/0000000005/0000.0.bundle")
    own = bundle.read_bytes()
    bundle.write_bytes(own.replace(b'"by":2,', b'"by":1,'))  # as if its own were gone, and one of another stood there
    found_then = recompute_offers(run)
    bundle.write_bytes(own)
    assert sorted((step, name) for step, _, name, _ in found_then.off) == [(0, "r00-1"), (0, "r01-2"), (1, "r00-1")]
    (text,) = found_then.unchecked
    assert text.endswith("its log tells of 0 bundles of others in outer step 1, and 1 are in its places")
    (log := Path(fleet.url, "log", "r01-2")).rename(aside := Path(fleet.url).with_name("aside"))
    found_then = recompute_offers(run)
    aside.rename(log)
    assert sorted(name for _, _, name, _ in found_then.off) == ["r00-1", "r00-1"] and len(found_then.unchecked) == 2
    verdict = Verdict([0])
    found.add_to(verdict)
    assert verdict.good and verdict.lines()[-1].endswith("is equal; 4 parts were not checked (see above)")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("diloco.audit.inner.build_inner", Mock(side_effect=InnerError("agent.py needs a package")))
        recompute_offers(run).add_to(verdict := Verdict([0]))
    assert not verdict.good, "before: exit code 0, and everything that was compared was equal"
    assert verdict.lines()[-1].endswith("the inner steps of 2 sessions could not be taken on this machine (see above)")


@pytest.mark.slow  # is_unlucky, BucketPlaces and the simulator are tested by default
@pytest.mark.timeout(300)
def test_a_store_that_is_away_in_a_recomputation_is_no_part_that_was_not_checked() -> None:
    run: Any = SimpleNamespace(config=RunConfig("away"), store=MemoryStore())
    offers = {Holder("r00", 1): {0: Mock()}}
    with (
        patch("diloco.audit.inner._offers_of_sessions", return_value=offers),
        patch("diloco.audit.inner._Session", side_effect=GaveUp("no answer for 10 s")),
        pytest.raises(GaveUp, match="no answer for 10 s"),
    ):
        recompute_offers(run)


def test_bundles_that_may_have_ended_two_sessions_are_passed_over(tmp_path: Path) -> None:
    """A generation that is too long for the device's memory ended every replacement, which trained on it again."""
    fleet = a_fleet(tmp_path)
    fleet.start("r00")
    fleet.start("r01", die="before:create:.bundle@3").join()
    fleet.start("r01", die="before:create:.bundle@1").join()
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, -9, 0]}, fleet.logs()
    found = audited(fleet)
    assert (found.equal, found.off, found.unchecked, found.remade) == (4, [], [], 0)
    first, second = sorted(Path(fleet.url).glob("rollouts/r01/0000000000/*.bundle"))
    (old, _), (new, payload) = read_record(first.read_bytes()), read_record(second.read_bytes())
    assert (old.by, new.by) == (1, 3) and old.digest != new.digest  # other random numbers, too
    assert len(unpack(bytes(payload)).ids) == 16


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_last_outer_steps_bundles_are_counted_in_the_log(tmp_path: Path) -> None:
    """They were told after the session's last write of its log."""
    fleet = a_fleet(tmp_path)
    fleet.start("r00")
    fleet.start("r01", die="before:create:.bundle@7").join()
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0]}, fleet.logs()
    assert [(e["step"], e["bundles"] > 0) for e in events(fleet, "rollouts_found")] == [(1, True)]
    shutil.rmtree(Path(fleet.url) / "rollouts")  # r01-2 had random states that its own seeds do not give
    found = audited(fleet)
    assert found.equal == 3 and not found.off, found
    (text,) = found.unchecked
    assert "the pseudogradient of r01-2 in step 1 differs" in text
    assert "and rollouts/r01/0000000004/0000.0.bundle is gone, which an earlier session may have sampled" in text


def _frozen(fleet: Fleet, to: Path, rollouts: int) -> None:
    """`diloco traces` has every rollout, with its reward and its tool's error."""
    made = freeze(fleet.store, to)
    states = [json.loads(line) for line in to.read_text().splitlines()]
    assert made["rollouts"] == rollouts and 0 < made["errors"] < made["states"] == len(states)
    assert {state["reward"] for state in states} == {0.0, 1.0} and states[0]["tools"]
    assert states[0]["state_id"].startswith("r00/0/0/0.0.0:")


def _flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "changes",
    [
        {"outer": {"codec": "int8"}},
        {"outer": {"codec": "topk"}},
        {"outer": {"codec": "bf16-gate", "lr": "auto"}},
        {"inner": INNER},
        {"inner": {**PLAIN, "grpo": {"objective": "dapo", "steps_per_generation": 2}}},
        {"inner": {"loop": "supervised"}},
        {"fleet": {"record_rollouts": False}},
    ],
    ids=["int8", "topk", "gate-auto", "channels", "dapo", "supervised", "not-recorded"],
)
def test_an_audit_takes_the_inner_steps_of_any_run_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    fleet = a_fleet(tmp_path, **{**changes, "fleet": {"steps": 4, **changes.get("fleet", {})}})
    fleet.start("r00")
    fleet.start("r01", die="after:create:/offer@2").join()
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0]}, fleet.logs()
    found = audited(fleet)
    assert not found.off and not found.close and not found.unchecked and found.equal >= 7, found


# ---------------------------------------------------------------------- one place


class Trouble:
    """A fault of the store in front of another store."""

    def __init__(self, store: Any, error: Exception) -> None:
        self._store, self._error = store, error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def create(self, key: str, body: bytes) -> None:
        raise self._error


def places(store: Any, told: list[Any] | None = None, clock: Any = None, **changes: Any) -> BucketPlaces:
    named = {"run": "n", "slot": "r01", "by": 1, "engine": "transformers", **changes}
    emit = (lambda event, **fields: told.append((event, fields))) if told is not None else lambda *_, **__: None
    return BucketPlaces(store, clock or SystemClock(), emit, **named)


FITS = lambda bundle: ""  # noqa: E731
HERE = BundlePlace(5, 42, 0)
KEY = "rollouts/r01/0000000042/0000.0.bundle"


def test_one_get_and_one_put_per_bundle() -> None:
    calls: list[tuple[str, str]] = []

    class Counting(MemoryStore):
        def get(self, key: str) -> bytes | None:
            calls.append(("get", key))
            return super().get(key)

        def create(self, key: str, body: Any) -> None:
            calls.append(("create", key))
            super().create(key, body)

    store, (made, _) = Counting("memory://x"), a_bundle()
    here = places(store)
    assert here.find(HERE, FITS) is None and here.put(HERE, made, FITS) is made
    assert calls == [("get", KEY), ("create", KEY)]
    found = places(store, by=2).find(HERE, FITS)
    assert found is not None and found.pack() == made.pack() and len(calls) == 3
    assert len(store.get(KEY) or b"") < len(made.pack()) + 500


def test_without_actors_a_session_that_has_found_no_bundle_only_puts() -> None:
    """Unless another process of its slot was faster: then its bundle counts."""
    gets = list[str]()

    class Counting(MemoryStore):
        def get(self, key: str) -> bytes | None:
            gets.append(key)
            return super().get(key)

    store, (made, _) = Counting("memory://x"), a_bundle()
    here, other = places(store, staleness=-1), places(store, by=2, staleness=-1)
    for bundle in range(3):
        place = HERE._replace(bundle=bundle)
        assert here.find(place, FITS) is None and here.put(place, made, FITS) is made
    assert gets == [KEY]
    assert all(other.find(HERE._replace(bundle=bundle), FITS) is not None for bundle in range(3))
    late = HERE._replace(bundle=3)
    assert other.find(late, FITS) is None and other.put(late, made, FITS) is made
    stands = here.put(late, a_bundle()[0], FITS) if here.find(late, FITS) is None else None
    assert stands is not None and stands.pack() == made.pack()


def test_a_store_that_fails_is_waited_for_once_in_an_outer_step() -> None:
    """Before, an outage cost PATIENCE_S in each generation, though the round could end without the store."""
    tries = list[str]()

    class Silent(MemoryStore):
        def create(self, key: str, body: Any) -> None:
            tries.append(key)
            raise StoreRefused("not now")

    (made, _), here = a_bundle(), places(Silent("memory://x"), told := list[Any](), staleness=-1)
    for outer, generation in ((5, 42), (5, 43), (5, 44), (6, 45)):
        place = BundlePlace(outer, generation, 0)
        assert here.find(place, FITS) is None and here.put(place, made, FITS) is made
    assert len(tries) == 2 and [fields["step"] for _, fields in told] == [5, 6]


def test_a_store_that_fails_once_does_not_end_the_looks_for_a_predecessors_bundles() -> None:
    (made, _), fails = a_bundle(), [True]

    class Failing(MemoryStore):
        def get(self, key: str) -> bytes | None:
            if fails[0]:
                raise StoreRefused("not now")
            return super().get(key)

    store = Failing("memory://x")
    fails[0] = False
    places(store).put(later := HERE._replace(bundle=1), made, FITS)
    fails[0] = True
    here = places(store, by=2, staleness=-1)
    assert here.find(HERE, FITS) is None
    fails[0] = False
    assert here.find(later, FITS) is not None


@pytest.mark.parametrize("staleness", [0, -1])
def test_the_faster_process_wins_and_both_train_on_its_bundle(staleness: int) -> None:
    store, (made, _) = MemoryStore("memory://x"), a_bundle()
    slow, fast = places(store, told := list[Any](), staleness=staleness), places(store, by=2, staleness=staleness)
    assert slow.find(HERE, FITS) is None and fast.find(HERE, FITS) is None
    assert fast.put(HERE, made, FITS) is made
    other, _ = a_bundle()
    stands = slow.put(HERE, other, FITS)
    assert stands is not other and stands.pack() == made.pack()
    slow.tell()
    assert told == [("rollouts_found", {"step": HERE.outer, "bundles": 1, "expired": 0})]


def test_after_two_unlucky_sessions_only_own_bundles_count() -> None:
    store, (made, _) = MemoryStore("memory://x"), a_bundle()
    places(store).put(HERE, made, FITS)
    third = places(store, told := list[Any](), by=3, anew=True)
    assert third.find(HERE, FITS) is None
    other, _ = a_bundle()
    assert third.put(HERE, other, FITS) is other and not told
    again = places(store, by=3, anew=True).find(HERE, FITS)
    assert again is not None and again.pack() == other.pack()


def test_sessions_without_counted_work_are_counted_from_the_last_that_had_some() -> None:
    counted = [SimpleNamespace(generation=g) for g in (1, 1, 4)]
    counts = [uncounted_sessions(counted, generation) for generation in (1, 2, 3, 4, 5, 6, 7)]  # pyright: ignore
    assert counts == [0, 0, 1, 2, 0, 1, 2] and uncounted_sessions([], 3) == 2


@pytest.mark.parametrize(
    ("generation", "is_so", "reads"), [(2, False, 0), (3, True, 3), (4, True, 3), (5, False, 3), (9, True, 1)]
)
def test_a_session_is_unlucky_after_two_without_counted_work_and_an_audit_sees_that_later(
    generation: int, is_so: bool, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generation 4 offered in step 2, and 6 in steps 30 to 39; an audit asks about earlier sessions, too."""
    asked, by_step = list[int](), {2: 4, **dict.fromkeys(range(30, 40), 6)}

    def offers(store: Any, until: int, together: Any, since: int) -> dict[str, Any]:
        asked.append(since)
        return {"r01": [SimpleNamespace(generation=g) for t, g in by_step.items() if since <= t < until]}

    monkeypatch.setattr(data_position, "first_open_step", lambda store: 40)
    monkeypatch.setattr(data_position, "read_offers", offers)
    assert data_position.is_unlucky(MemoryStore("memory://x"), "r01", generation) == is_so
    assert len(asked) == reads


@pytest.mark.parametrize(
    ("generation", "told", "claimed", "words"),
    [
        (1, [], True, ""),
        (2, ["joined"], True, ""),
        (
            2,
            ["joined", "inherited"],
            True,
            "it took over the state that r01-1 left, and the record of that state is gone",
        ),
        (2, [], True, "its log is gone, so it is not known whether it took over the state of r01-1"),
        (1, [], False, "its claim is gone, so it is not known how many processes it had"),
    ],
)
def test_a_session_whose_beginning_is_lost_is_not_accused(
    generation: int, told: list[str], claimed: bool, words: str
) -> None:
    """A copy of a live run may have its pseudogradients, but no leave record, log or claim of an earlier moment."""
    store, compared = MemoryStore("memory://x"), OfferComparison.__new__(OfferComparison)
    if claimed:
        store.put(layout.claim_key("r01", generation), Claim("r01", generation, "n", 0.0).encode())
    report = SimpleNamespace(events=[{"who": f"r01-{generation}", "event": kind} for kind in told])
    vars(compared).update(_holder=Holder("r01", generation), _store=store, _report=report)
    assert compared._lost_beginning == words


def test_rollouts_whose_texts_no_bundle_holds_are_trained_on_and_not_recorded() -> None:
    """Before, each session ended at them: 512 rollouts of 200 KB are enough, and a text of CJK has 7 bytes a letter."""
    store, (made, _) = MemoryStore("memory://x"), a_bundle()
    large = replace(made, completions=[[{"role": "assistant", "content": "x" * 100_000_000}], *made.completions[1:]])
    own = places(store, told := list[Any]())
    assert own.put(HERE, large, FITS) is large and not own.deliver(HERE, large) and store.list("") == []
    assert [kind for kind, _ in told] == ["rollouts_lost"] * 2
    assert re.search("are not recorded: their 100,[0-9,]+ bytes of texts do not fit", told[0][1]["text"])


def test_an_actors_bundle_goes_into_an_empty_place_only() -> None:
    store, (made, _) = MemoryStore("memory://x"), a_bundle()
    actor = places(store, by=0, actor="a01")
    with_log_probs = replace(made, logprobs=[[-1.0] * len(ids) for ids in made.ids])
    assert actor.deliver(HERE, with_log_probs) and not places(store, by=0, actor="a02").deliver(HERE, made)
    assert store.list("rollouts/") == [KEY]
    for outer, staleness, is_used in ((5, 0, True), (6, 0, False), (6, 1, True), (4, 9, False)):
        found = places(store, staleness=staleness).find(BundlePlace(outer, 42, 0), FITS)
        assert (found is not None) == is_used, (outer, staleness)
    old = places(store, told := list[Any](), staleness=1)
    assert old.find(BundlePlace(7, 42, 0), FITS) is None and old.find(BundlePlace(8, 44, 0), FITS) is None
    assert told == [("rollouts_found", {"step": 7, "bundles": 0, "expired": 1})]
    newest = places(store, told := list[Any](), staleness=1)
    assert newest.find(BundlePlace(6, 42, 0), FITS) is not None and not told
    newest.tell()  # a run's last outer step has none after it
    newest.tell()
    assert told == [("rollouts_found", {"step": 6, "bundles": 1, "expired": 0})]
    bare, told = MemoryStore("memory://y"), list[Any]()
    places(bare, by=0, actor="a01").deliver(HERE, made)
    assert places(bare, told).find(HERE, FITS) is None and "left out their log-probs" in told[0][1]["text"]


def test_what_cannot_be_used_is_told_and_the_next_attempt_counts(tmp_path: Path) -> None:
    (made, _), told = a_bundle(), list[Any]()
    store = FileStore(tmp_path)
    places(store).put(HERE, made, FITS)
    _flip(tmp_path / KEY)
    here = places(store, told)
    assert here.find(HERE, FITS) is None
    here.put(HERE, made, FITS)
    assert told[0][0] == "rollouts_refused" and "another digest" in told[0][1]["text"]
    assert (tmp_path / KEY.replace(".0.bundle", ".1.bundle")).exists() and places(store).find(HERE, FITS) is not None
    (tmp_path / "rollouts/r01/0000000043").mkdir()
    for attempt, body in enumerate((b"", b"\n", b"{}", b"x\n{}\n", b"x" * 300)):
        (tmp_path / f"rollouts/r01/0000000043/0000.{attempt}.bundle").write_bytes(body)
    assert places(store, told).find(BundlePlace(5, 43, 0), FITS) is None and len(told) == 5


@pytest.mark.parametrize("odd", [[{"role": "assistant", "tool_calls": [{}]}], ["text"], [{"role": []}, None]])
def test_a_bundle_of_odd_messages_costs_the_traces_its_own_rollouts_alone(odd: Any) -> None:
    """Before: `diloco traces` ended with a KeyError, and wrote nothing of all other bundles."""
    store, (made, _) = MemoryStore("memory://x"), a_bundle()
    places(store).put(HERE, replace(made, completions=[*made.completions[:-1], odd]), FITS)
    places(store).put(BundlePlace(5, 43, 0), made, FITS)
    with pytest.warns(TraceWarning, match=f"{KEY}: .* It is left out"):
        states = list(run_states(store, "n"))
    assert states and {state["state_id"].split("/")[1] for state in states} == {"43"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"random": RandomStates({}, {})}, "random states cannot be restored"),
        ({"rewards": torch.full((16, 1), 1e30)}, "a reward of 1"),
    ],
)
def test_a_whole_bundle_of_a_broken_writer_ends_no_run(change: dict[str, Any], words: str) -> None:
    (made, _), store, told = a_bundle(), MemoryStore("memory://x"), list[Any]()
    places(store).put(HERE, replace(made, **change), FITS)
    here = places(store, told, by=2)
    assert here.find(HERE, FITS) is None and here.put(HERE, made, FITS) is made
    assert [(event, fields["key"]) for event, fields in told] == [("rollouts_refused", KEY)]
    assert words in told[0][1]["text"]
    found = places(store, by=3).find(HERE, FITS)
    assert found is not None and found.pack() == made.pack()


@pytest.mark.parametrize(("place", "named"), [(BundlePlace(6, 42, 0), {}), (BundlePlace(5, 42, 0), {"run": "another"})])
def test_bundles_of_another_outer_step_or_run_are_not_used(place: BundlePlace, named: dict[str, str]) -> None:
    store, (made, _) = MemoryStore("memory://x"), a_bundle()
    places(store).put(HERE, made, FITS)
    assert places(store, **named).find(place, FITS) is None
    assert places(store).find(HERE, FITS) is not None


def test_a_store_that_takes_nothing_costs_the_record_and_not_the_step() -> None:
    (made, _), told = a_bundle(), list[Any]()
    full = Trouble(MemoryStore("memory://x"), StoreRefused("the quota is full"))
    assert places(full, told).put(HERE, made, FITS) is made
    assert told[0][0] == "rollouts_lost" and "the quota is full" in told[0][1]["text"]


def test_the_words_about_a_store_without_an_answer_are_for_a_run_that_goes_on() -> None:
    (made, _), told, clock = a_bundle(), list[Any](), ManualClock()
    away = Trouble(MemoryStore("memory://x"), StoreUnclear("cannot write: 503 SlowDown"))
    silent = places(away, told, clock=clock)
    assert silent.put(HERE, made, FITS) is made and clock.now() >= 30
    assert told[0][1]["text"] == "these rollouts are not recorded: cannot write: 503 SlowDown"


def test_a_replica_does_not_wait_for_space_for_its_bundles() -> None:
    """Its session's store would, for minutes; offers need that."""
    full = Trouble(MemoryStore("memory://x"), StoreFull("no space is left"))
    told: list[str] = []
    rv = SimpleNamespace(store=PatientStore(full, SystemClock(), 600.0), slot="r00", generation=1)
    session: Any = SimpleNamespace(rv=rv, clock=SystemClock(), emit=lambda event, **fields: told.append(event))
    fleet = FleetConfig(record_rollouts=True, keep="all", staleness=0, check_rollouts=0.0)
    run: Any = SimpleNamespace(record=SimpleNamespace(nonce="n", parent=Parent()), config=SimpleNamespace(fleet=fleet))
    loop = build_inner(InnerConfig(**SMALL), small_folder(), {}, Seeds(data=0, noise=0))
    keep_rollouts(run, session, loop)
    left = iter([False, True])
    began = time.monotonic()
    loop.train(lambda: next(left))
    assert told == ["rollouts_lost"] * 2 and time.monotonic() - began < 20


@pytest.mark.parametrize(("shards", "images"), [(True, False), (False, True)])
def test_a_replica_without_a_whole_model_or_with_images_records_nothing(*, shards: bool, images: bool) -> None:
    fleet, inner = FleetConfig(), SimpleNamespace(lora=None)
    run: Any = SimpleNamespace(config=SimpleNamespace(fleet=fleet, inner=inner))
    loop: Any = SimpleNamespace(trainer=SimpleNamespace(_is_vlm=images), group=object() if shards else None)
    keep_rollouts(run, SimpleNamespace(), loop)()  # type: ignore[arg-type]
    assert not hasattr(loop.trainer, "places")


def test_a_run_without_broadcast_weights_has_no_actors() -> None:
    config = RunConfig.from_dict({"inner": {"model": "toolworld"}})
    assert config.fleet.record_rollouts and staleness_in(SimpleNamespace(config=config)) == -1  # type: ignore[arg-type]
    assert staleness_in(SimpleNamespace(config=prepared_for_actors(config))) >= 0  # type: ignore[arg-type]
    (made, _), store = a_bundle(), MemoryStore("memory://x")
    with_log_probs = replace(made, logprobs=[[-1.0] * len(ids) for ids in made.ids])
    assert places(store, by=0, actor="a01").deliver(HERE, with_log_probs)
    assert places(store, staleness=-1).find(HERE, FITS) is None
    assert places(store, staleness=-1).put(HERE, made, FITS) is made


def test_under_a_run_key_another_writers_bundle_is_nothing() -> None:
    (made, _), bucket = a_bundle(), MemoryStore("memory://x")
    sealed = under_key(bucket, SystemClock(), b"k" * 16)
    places(sealed).put(HERE, made, FITS)
    record, payload = read_record(sealed.get(KEY) or b"")
    assert record.digest.startswith("sha256:") and unpack(bytes(payload)).pack() == made.pack()
    forged = bytearray(bucket.get(KEY) or b"")
    forged[100] ^= 1
    bucket.put(KEY, bytes(forged))
    told: list[Any] = []
    sealed.emit = lambda event, **fields: told.append(event)  # type: ignore[attr-defined]
    here = places(sealed)
    assert here.find(HERE, FITS) is None and here.put(HERE, made, FITS) is made and told == ["forged"]
    assert places(sealed).find(HERE, FITS) is not None


@pytest.mark.slow
def test_bundles_live_as_long_as_theta_of_their_steps(tmp_path: Path) -> None:
    fleet = a_fleet(tmp_path, outer={"snapshot_every": 1}, fleet={"steps": 20, "keep": "window"})
    fleet.start_all()
    fleet.wait()
    since = read_reach(fleet.store).since
    kept = [read_record(path.read_bytes())[0].step for path in Path(fleet.url).glob("rollouts/*/*/*")]
    assert since > 16 and min(kept) >= 8 and max(kept) == 19, (since, sorted(kept))
    found = audited(fleet)
    assert (
        not found.off and not found.equal and "nothing is left" in found.unchecked[0]
    ) or "no snapshot" in found.unchecked[0]


def test_old_bundles_go_a_predecessors_too() -> None:
    (made, _), store = a_bundle(), MemoryStore("memory://x")
    for generation in (3, 4):
        places(store).put(BundlePlace(1, generation, 0), made, FITS)
    old = OldBundles(store, "r01", Inline(), no_emit)
    reach = [0]
    with patch("diloco.replica.old_bundles.read_reach", lambda _: Reach(reach[0])):
        for step, generation, since in ((2, 5, 0), (10, 6, 2), (18, 7, 10)):
            places(store).put(BundlePlace(step, generation, 0), made, FITS)
            reach[0] = since
            old.note(BundlePlace(step, generation, 0))
    assert [key.split("/")[2] for key in store.list("rollouts/")] == ["0000000006", "0000000007"]


def test_the_bundles_of_a_fork_go_by_its_own_steps() -> None:
    """Its places count its ancestor's outer steps, and its snapshots do not."""
    (made, _), store = a_bundle(), MemoryStore("memory://x")
    old = OldBundles(store, "r01", Inline(), no_emit, parent=500)
    with patch("diloco.replica.old_bundles.read_reach", lambda _: Reach(2)):
        for step in (500, 501, 508):
            places(store).put(BundlePlace(step, step, 0), made, FITS)
            old.note(BundlePlace(step, step, 0))
    assert [key.split("/")[2] for key in store.list("rollouts/")] == ["0000000508"]


def test_old_bundles_are_looked_for_every_eighth_outer_step() -> None:
    """A look costs a LIST and some GETs."""
    looks = list[Store]()
    old = OldBundles(MemoryStore("memory://x"), "r01", Inline(), no_emit)
    with patch("diloco.replica.old_bundles.read_reach", lambda store: looks.append(store) or Reach(0)):
        for step in range(40):
            old.note(BundlePlace(step, step, 0))
    assert len(looks) == 5
