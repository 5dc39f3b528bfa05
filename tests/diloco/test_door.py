"""The check at the door: which of an actor's bundles a replica checks, what a doubt costs, that all decide alike."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from diloco.audit.inner import recompute_offers
from diloco.process import exitcodes
from diloco.replica.door import Check, DoorFinding, ModelCheck, RolloutDoor, start_weights, turns_of
from diloco.run.record import Parent, read_run
from inner.rollouts.recording.acting import Sampler
from inner.rollouts.recording.bundle import Bundle, TooFar
from inner.rollouts.recording.recorded import BundlePlace
from rendezvous import layout
from rendezvous.agreement.membership import read_beat
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreRefused
from rendezvous.records.digests import digest
from rendezvous.records.judgements import LARGE, RolloutVerdict
from rendezvous.records.records import Weights, WeightsPart
from rendezvous.records.rollouts import read_record, seal_bundle
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.run_key import under_key
from rendezvous.weights import patch
from tests.diloco.test_actor import bundles, sampled_by
from tests.diloco.test_recorded_fleet import PLAIN, Trouble, a_fleet, events, places
from tests.inner.test_acting import SHARE, a_loop
from tests.support import independent_reader

FITS = lambda bundle: ""  # noqa: E731
BELIEVED, DOUBTED = DoorFinding("", 0.01, 0.1), DoorFinding("its log-probs are not the model's", 0.9, 7.0)


def put_weights(store: MemoryStore, model: torch.nn.Module, t: int) -> None:
    """Write an anchor with the model's parameters."""
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    flat = torch.cat([p.detach().float().flatten() for _, p in named]).numpy()
    bits, blob = patch.bf16_bits(flat), layout.weights_blob(t, "0")
    body = patch.encode(patch.whole(bits, 0))
    store.put(blob, bytes(body))
    part = WeightsPart(blob, len(body), digest(body, "xxh3-128"))
    shapes = [[n, list(p.shape), "float32"] for n, p in named]
    made = Weights(t, "b", "", patch.digest_of_bits(bits), len(bits), len(bits), (part,), "n", 0.0, shapes)
    store.put(layout.weights_key(t), made.encode())


def round_to_bf16(model: torch.nn.Module, noise: float = 0.0) -> None:
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_((p * (1 + noise * torch.randn_like(p))).bfloat16())


def sampled(model_noise: float = 0.0) -> Bundle:
    loop = a_loop()
    round_to_bf16(loop.model, model_noise)
    return Sampler(loop.trainer).sample(SHARE, 0)


@pytest.fixture(scope="module")
def honest() -> Bundle:
    return sampled()


@pytest.fixture(scope="module")
def liar() -> Bundle:
    return sampled(model_noise=1.0)


def a_check(*found: DoorFinding, asked: list[Any] | None = None) -> Check:
    left = iter(found)

    def check(step: int, bundle: Bundle, seed: int) -> DoorFinding:
        if asked is not None:
            asked.append((step, seed))
        return next(left)

    return check


def a_fail() -> Any:
    raise AssertionError("the start weights are not asked for")


def at_door(store: Any, check: Check | None, told: list[Any] | None = None, by: int = 1, share: float = 0.0) -> Any:
    found = places(store, told, by=by, staleness=2)
    emit = found._emit
    found.door = RolloutDoor(store, SystemClock(), emit, check, run="n", slot="r01", by=by, share=share, parent=0)
    return found


def deliver(store: MemoryStore, bundle: Bundle, *generations: int, actor: str = "a07") -> None:
    for g in generations:
        assert places(store, by=0, actor=actor).deliver(BundlePlace(5, g, 0), bundle)


def at(generation: int, outer: int = 5) -> BundlePlace:
    return BundlePlace(outer, generation, 0)


def verdicts(store: MemoryStore) -> dict[str, RolloutVerdict]:
    keys = [key for key in store.list("rollouts/") if key.endswith(".verdict")]
    return {key: RolloutVerdict.decode(store.get(key) or b"") for key in keys}


# ---------------------------------------------------------------------- the model's own check


def test_an_honest_actors_first_bundle_is_believed_and_the_model_is_as_before(honest: Bundle) -> None:
    store, loop = MemoryStore("memory://x"), a_loop()
    rounded = a_loop()
    round_to_bf16(rounded.model)
    put_weights(store, rounded.model, 5)
    round_to_bf16(loop.model, noise=0.3)  # the replica has trained on
    loop.model.train()
    before = {n: p.detach().clone() for n, p in loop.model.named_parameters()}
    random = torch.random.get_rng_state()
    deliver(store, honest, 42)
    here = at_door(store, ModelCheck(store, loop.trainer, loop.model, a_fail), told := list[Any]())
    assert here.find(at(42), FITS) is not None and not told
    ((key, verdict),) = verdicts(store).items()
    assert key == "rollouts/r01/0000000042/0000.0.verdict" and verdict.actor == "a07" and not verdict.doubts
    assert verdict.disagreement < 0.02 and abs(verdict.surprise) < 5
    assert all(torch.equal(before[n], p) for n, p in loop.model.named_parameters()), "to the bit"
    assert loop.model.training and torch.equal(random, torch.random.get_rng_state())


def test_an_honest_vllm_without_the_log_prob_of_one_token_is_believed(honest: Bundle) -> None:
    store, loop = MemoryStore("memory://x"), a_loop()
    round_to_bf16(loop.model)
    put_weights(store, loop.model, 5)
    rows = [list(row) for row in honest.logprobs or []]
    rows[0][0] = float("nan")
    deliver(store, replace(honest, logprobs=rows), 42)
    here = at_door(store, ModelCheck(store, loop.trainer, loop.model, a_fail), told := list[Any]())
    assert here.find(at(42), FITS) is not None and not told


def test_an_actor_with_other_weights_is_doubted_and_the_replica_makes_the_place(liar: Bundle, honest: Bundle) -> None:
    store, loop = MemoryStore("memory://x"), a_loop()
    round_to_bf16(loop.model)
    put_weights(store, loop.model, 5)
    deliver(store, liar, 42)
    here = at_door(store, ModelCheck(store, loop.trainer, loop.model, a_fail), told := list[Any]())
    assert here.find(at(42), FITS) is None and here.put(at(42), honest, FITS) is honest
    ((event, fields),) = told
    assert event == "rollouts_doubted" and fields["actor"] == "a07" and "log-probs are not" in fields["text"]
    own, _ = read_record(store.get("rollouts/r01/0000000042/0000.1.bundle") or b"")
    assert own.by == 1 and not own.actor
    for other in (at_door(store, a_check(), by=2), at_door(store, None, by=1)):
        found = other.find(at(42), FITS)
        assert found is not None and found.pack() == honest.pack(), "a replacement and an audit decide alike"


def test_a_liar_that_is_too_far_from_the_policy_is_doubted_all_the_same(honest: Bundle) -> None:
    """The replica would not have trained on it; but its actor is to be repaired."""
    store, told = MemoryStore("memory://x"), list[Any]()
    deliver(store, honest, 42, 43)
    here = at_door(store, a_check(DoorFinding("wrong"), DoorFinding("")), told)
    far = lambda bundle: TooFar("it is 0.50 nats per token from the present weights")  # noqa: E731
    assert here.find(at(42), far) is None and here.find(at(43), far) is None
    assert [(event, fields["actor"]) for event, fields in told] == [("rollouts_doubted", "a07")]


@pytest.mark.parametrize("step", [3, 4])
def test_an_actor_that_names_weights_which_the_bucket_has_not_is_doubted(honest: Bundle, step: int) -> None:
    store, loop = MemoryStore("memory://x"), a_loop()
    put_weights(store, loop.model, 4)
    store.put(layout.weights_blob(4, "0"), b"damaged")
    assert places(store, by=0, actor="a07").deliver(BundlePlace(step, 42, 0), honest)
    here = at_door(store, ModelCheck(store, loop.trainer, loop.model, a_fail), told := list[Any]())
    assert here.find(at(42, outer=5), FITS) is None
    assert f"weights of outer step {step}, and the bucket has no sound copy" in told[0][1]["text"]


def test_only_the_models_tokens_are_checked_and_a_bounded_number_of_them(honest: Bundle) -> None:
    assert honest.mask is not None
    turns = turns_of(honest, seed=1)
    assert sum(len(ids) for _, ids, _ in turns) == sum(map(sum, honest.mask)) and len(turns) > len(honest.ids)
    long = replace(honest, ids=[[1] * 999] * 40, mask=None, logprobs=[[-1.0] * 999] * 40, prompt_ids=[[1]] * 40)
    assert [(len(ids), len(logps)) for _, ids, logps in turns_of(long, seed=1)] == [(256, 256)] * 16


# ---------------------------------------------------------------------- which bundles are checked


def test_the_first_is_checked_then_a_share_and_after_a_doubt_all(honest: Bundle) -> None:
    store, asked = MemoryStore("memory://x"), list[Any]()
    deliver(store, honest, *range(40, 46))
    here = at_door(store, a_check(BELIEVED, asked=asked))
    assert all(here.find(at(g), FITS) is not None for g in range(40, 43)) and len(asked) == 1
    deliver(store, honest, 46, 47, actor="a08")
    here = at_door(store, a_check(DOUBTED, BELIEVED, asked=asked), by=2)
    assert here.find(at(46), FITS) is None and here.find(at(47), FITS) is not None and len(asked) == 3
    assert here.find(at(45), FITS) is not None and len(asked) == 3, "another actor's doubt is not a07's"


def test_an_actor_that_was_doubted_twice_is_not_used_any_more_and_not_checked(honest: Bundle) -> None:
    store, asked, told = MemoryStore("memory://x"), list[Any](), list[Any]()
    deliver(store, honest, *range(40, 45))
    here = at_door(store, a_check(BELIEVED, DOUBTED, DOUBTED, asked=asked), told, share=1.0)
    assert [here.find(at(g), FITS) is not None for g in range(40, 45)] == [True, False, False, False, False]
    assert len(asked) == 3 and len(told) == 3 and "under another name" in told[2][1]["text"]
    again = at_door(store, a_check(), by=2, share=1.0)
    assert [again.find(at(g), FITS) is not None for g in range(40, 45)] == [True, False, False, False, False]
    audit = at_door(store, None, by=1)
    assert [audit.find(at(g), FITS) is not None for g in range(40, 45)] == [True, False, False, False, False]


def test_a_later_sessions_verdict_does_not_bind_the_audit_of_an_earlier_one(honest: Bundle) -> None:
    store = MemoryStore("memory://x")
    deliver(store, honest, 42)
    assert at_door(store, a_check(DOUBTED), by=2).find(at(42), FITS) is None
    assert at_door(store, None, by=1).find(at(42), FITS) is not None
    assert at_door(store, None, by=2).find(at(42), FITS) is None


def test_of_two_sessions_that_check_at_once_the_first_verdict_counts(honest: Bundle) -> None:
    store = MemoryStore("memory://x")
    deliver(store, honest, 42)

    def slow(step: int, bundle: Bundle, seed: int) -> DoorFinding:
        assert at_door(store, a_check(DOUBTED), by=1).find(at(42), FITS) is None
        return BELIEVED

    assert at_door(store, slow, by=2).find(at(42), FITS) is None


def test_the_draw_is_the_share_and_the_same_for_every_session_and_hangs_on_the_commit_before(honest: Bundle) -> None:
    def drawn(commit: bytes, by: int) -> list[int]:
        store.put(layout.commit_key(4), commit)
        door, asked = at_door(store, None, by=by, share=0.1).door, list[int]()
        door._known()["rollouts/r01/0000000000/0000.0.bundle"] = a_verdict(record.actor)
        door._judge = lambda *args: (asked.append(args[-1]), a_verdict("a07"))[1]
        door._check = a_check()
        for g in range(1, 1001):
            assert door.lets_in(at(g), layout.bundle_key("r01", g, 0, 0), record, honest)
        return asked

    store = MemoryStore("memory://x")
    deliver(store, honest, 42)
    record, _ = read_record(store.get("rollouts/r01/0000000042/0000.0.bundle") or b"")
    first = drawn(b"commit", by=1)
    assert 50 <= len(first) <= 150 and drawn(b"commit", by=2) == first and drawn(b"another", by=1) != first


def a_verdict(actor: str) -> RolloutVerdict:
    return RolloutVerdict("x", actor, 1, 5, 0.0, 0.0, "", "n")


def test_numbers_that_are_none_are_written_as_large_ones(honest: Bundle) -> None:
    store = MemoryStore("memory://x")
    deliver(store, honest, 42)
    at_door(store, a_check(DoorFinding("x" * 9999, float("nan"), float("-inf")))).find(at(42), FITS)
    (found,) = verdicts(store).values()
    assert (found.disagreement, found.surprise, len(found.doubts)) == (LARGE, -LARGE, 2000)


def test_under_a_run_key_another_writers_verdict_is_nothing(honest: Bundle) -> None:
    bucket = MemoryStore("memory://x")
    sealed: Any = under_key(bucket, SystemClock(), b"k" * 16)
    deliver(sealed, honest, 42)
    bucket.put("rollouts/r01/0000000042/0000.0.verdict", replace(a_verdict("a07"), doubts="a lie").encode())
    sealed.emit = lambda event, **fields: None
    assert at_door(sealed, None).find(at(42), FITS) is not None


# ---------------------------------------------------------------------- other bad input


def with_record(store: MemoryStore, bundle: Bundle, key: str, **changes: Any) -> None:
    deliver(store, bundle, 99)
    record, payload = read_record(store.get("rollouts/r01/0000000099/0000.0.bundle") or b"")
    store.put(key, seal_bundle(bytes(payload), replace(record, **changes)))


KEY = "rollouts/r01/0000000042/0000.0.bundle"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"place": (43, 0)}, "they are of r01, generation 43"),
        ({"slot": "r02", "place": (42, 0)}, "they are of r02"),
        ({"run": "another", "place": (42, 0)}, "in run another"),
        ({"place": (42, 0), "digest": digest(b"x", "xxh3-128")}, "another digest"),
        ({"place": (42, 0), "tokens": 1}, "tokens, and 16 of 1 by their record"),
        ({"place": (42, 0), "rollouts": 15}, "they are 16 rollouts of "),
    ],
)
def test_what_is_not_of_this_place_costs_the_bundle_and_no_check(honest: Bundle, changes: Any, words: str) -> None:
    store, told = MemoryStore("memory://x"), list[Any]()
    with_record(store, honest, KEY, **changes)
    here = at_door(store, a_check(), told)
    assert here.find(at(42), FITS) is None and words in told[0][1]["text"] and not verdicts(store)


def test_a_bundle_for_a_slot_or_generation_that_no_replica_reaches_is_never_read(honest: Bundle) -> None:
    store, asked = MemoryStore("memory://x"), list[Any]()
    with_record(store, honest, "rollouts/r77/0000000042/0000.0.bundle", slot="r77", place=(42, 0))
    deliver(store, honest, 999_999)
    assert at_door(store, a_check(asked=asked)).find(at(42), FITS) is None and not asked


def test_an_actor_of_another_release_is_refused_by_its_records_version(honest: Bundle) -> None:
    store, told = MemoryStore("memory://x"), list[Any]()
    deliver(store, honest, 42)
    store.put(KEY, (store.get(KEY) or b"").replace(b'"wire":2', b'"wire":3'))
    assert at_door(store, a_check(), told).find(at(42), FITS) is None
    assert "run the release that started this run" in told[0][1]["text"]


def test_an_actor_that_may_not_write_ends_with_the_stores_reason(honest: Bundle) -> None:
    refused = Trouble(MemoryStore("memory://x"), StoreRefused("403: no permission to put"))
    with pytest.raises(StoreRefused, match="no permission"):
        places(refused, by=0, actor="a07").deliver(at(42), honest)


def test_without_the_run_key_an_actor_ends_before_it_reads_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from diloco.actor import main

    monkeypatch.setenv("DILOCO_RUN_KEY", "k" * 32)
    fleet = a_fleet(tmp_path, fleet={"broadcast_weights": True})
    monkeypatch.delenv("DILOCO_RUN_KEY")
    assert main([fleet.url, "--name", "a01"]) == exitcodes.USER_ERROR
    assert "DILOCO_RUN_KEY" in capsys.readouterr().err


def test_a_second_reader_finds_the_same_rollouts(honest: Bundle) -> None:
    """It is written from docs/formats.md, and imports nothing of ours."""
    store = MemoryStore("memory://x")
    deliver(store, honest, 42)
    body = store.get(KEY) or b""
    record, rollouts = independent_reader.bundle(body, "n", ("r01", 42, 0))
    assert record["actor"] == "a07" and record["step"] == 5 and record["by"] == 0
    for name in ("ids", "mask", "prompt_ids", "prompts", "completions", "names", "weights"):
        ours = list(getattr(honest, name))
        assert rollouts[name] == (list(map(list, ours)) if name in ("ids", "mask", "prompt_ids") else ours), name
    assert [len(row) for row in rollouts["logprobs"]] == [len(row) for row in rollouts["ids"]]
    assert rollouts["logprobs"][3] == pytest.approx((honest.logprobs or [])[3], abs=1e-6)
    assert rollouts["rewards"] == honest.rewards.tolist()
    at_payload = body.index(b"completions")
    damaged = body[:at_payload] + b"C" + body[at_payload + 1 :]
    for wrong, place in ((damaged, ("r01", 42, 0)), (body, ("r01", 43, 0)), (body[:-1], ("r01", 42, 0))):
        with pytest.raises(independent_reader.Unsound):
            independent_reader.bundle(wrong, "n", place)


# ---------------------------------------------------------------------- a fleet

LIE = """
import sys
from dataclasses import replace
from inner.rollouts.recording import acting
sample = acting.Sampler.sample
def lie(self, share, generation):
    made = sample(self, share, generation)
    return replace(made, logprobs=[[x - 0.5 for x in row] for row in made.logprobs])
acting.Sampler.sample = lie
from diloco.actor import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_fleet_finds_the_liar_among_its_actors_and_an_audit_agrees(tmp_path: Path) -> None:
    inner = {**PLAIN, "batch_size": 64}
    asked = {"steps": 100_000, "broadcast_weights": True, "min_replicas": 1, "check_rollouts": 0.5}
    fleet = a_fleet(tmp_path, inner=inner, fleet=asked)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    begin: Callable[..., Any] = lambda *words: subprocess.Popen([sys.executable, *words], env=environ)  # noqa: E731
    actors = [
        begin("-m", "diloco.actor", fleet.url, "--name", "a01"),
        begin("-c", LIE, fleet.url, "--name", "a02"),
    ]
    beats: Callable[[], Any] = lambda: (read_beat(fleet.store, name) for name in ("a01", "a02"))  # noqa: E731
    fleet.wait_for(lambda: all(beat is not None and beat.phase == "sample" for beat in beats()))
    fleet.start_all()
    fleet.wait_for(lambda: all(sampled_by(fleet, name) >= 4 for name in ("a01", "a02")))
    fleet.wait_for(lambda: len(events(fleet, "rollouts_doubted")) >= 2 and bool(events(fleet, "rollouts_found")))
    first = [record for record in bundles(fleet).values() if record.actor]
    assert any(record.step == 0 for record in first), "the start model's weights are checked, too"
    fleet.end_in(1)
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    assert [actor.wait(60) for actor in actors] == [exitcodes.DONE, exitcodes.DONE]
    assert {event["actor"] for event in events(fleet, "rollouts_doubted")} == {"a02"}
    doubted = [key for key, record in bundles(fleet).items() if ".1.bundle" in key and not record.actor]
    assert doubted
    found = recompute_offers(read_run(fleet.url))
    assert not found.off and not found.close and not found.unchecked and found.equal > 2, found


def test_a_fork_has_no_start_weights_to_check_with() -> None:
    """Its θ₀ is a snapshot of its ancestor's θ; the files of its model are the ancestor's start model."""
    record = SimpleNamespace(parent=Parent(url="memory://old", outer_steps=500))
    assert start_weights(cast("Any", SimpleNamespace(record=record))) is None
