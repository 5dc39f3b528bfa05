"""Rewards that come after their rollouts: what is written, what is read, and that training does not see them."""

import json
import os
import warnings
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from diloco.audit.comparison import Holder, Recomputed
from diloco.audit.inner import _Recorded  # pyright: ignore[reportPrivateUsage]
from diloco.model.late_rewards import count_late_rewards, give_reward, write_pairs
from diloco.model.traces import freeze, run_states
from diloco.replica.old_bundles import OldBundles
from diloco.run.config import ConfigError, load_config
from diloco.run.founding import open_run
from diloco.run.record import Run
from executors.cli.main import main
from inner import TraceWarning, reward_pairs, save_states
from inner.replay.pairs import training_pairs
from inner.replay.states import save_lines
from inner.rollouts.recording.bundle import Bundle
from inner.rollouts.recording.recorded import BundlePlace
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.background import Inline, no_emit
from rendezvous.errors import StoreRefused, StoreUnclear
from rendezvous.keeping.reach import Reach
from rendezvous.records.judgements import LateReward, RolloutVerdict
from rendezvous.records.rollouts import read_record, seal_bundle
from rendezvous.stores.files import FileStore
from rendezvous.stores.memory import MemoryStore
from rendezvous.stores.run_key import under_key
from rendezvous.stores.signed import SignedStore
from tests.diloco.test_recorded_fleet import FITS, HERE, KEY, Trouble, places
from tests.inner.test_recorded import a_bundle
from tests.support import independent_reader as reader
from tests.support.fakes import ManualClock

THIRD = "r01/42/5/0.0.3"  # a rollout of HERE
REWARD = "rollouts/r01/0000000042/0000.0.0003.human.reward"


@cache
def bundle() -> Bundle:
    return a_bundle()[0]


def a_run(store: Any = None) -> Run:
    store = MemoryStore("memory://late") if store is None else store
    config = load_config(Path(__file__).parents[2] / "diloco" / "demo.toml", ["fleet.record_rollouts=true"])
    record: Any = open_run(config, "memory://run-of-late-rewards", ManualClock()).record
    run = Run(store.url, store, replace(record, nonce="n"))
    places(store).put(HERE, bundle(), FITS)
    return run


def give(run: Run, rollout: str = THIRD, value: float = 0.7, name: str = "human") -> LateReward:
    return give_reward(run, ManualClock(), rollout, value, name)


# writing


def test_a_reward_lies_beside_its_bundle_with_the_one_that_was_trained_on() -> None:
    run = a_run()
    given = give(run)
    assert given == LateReward.decode(run.store.get(REWARD) or b"")
    assert given.recorded == float(bundle().rewards[3].sum()) and (given.value, given.rollout) == (0.7, 3)
    assert give(run, f"{THIRD}:5", name="nightly").name == "nightly", "a state_id names its rollout, too"
    assert sorted(run.store.list("rollouts/")) == sorted([KEY, REWARD, REWARD.replace("human", "nightly")])


def test_the_reader_that_was_written_from_the_page_reads_it() -> None:
    run = a_run()
    give(run)
    found = reader.bundle(run.store.get(KEY) or b"", "n", ("r01", 42, 0))
    body = run.store.get(REWARD) or b""
    assert reader.late_reward(REWARD, body, found) == (3, "human", 0.7)
    for key, other in ((REWARD.replace("human", "you"), body), (REWARD, body.replace(b'"recorded":', b'"recorded":4'))):
        with pytest.raises(reader.Unsound):
            reader.late_reward(key, other, found)


def test_the_first_of_a_name_stands_and_another_name_is_kept() -> None:
    run = a_run()
    first = give(run)
    assert give(run) == first, "the same again, after a lost answer, is no error"
    with pytest.raises(ConfigError, match=r"human has already given 0\.7 to r01/42/5/0\.0\.3\. .*--name human_2"):
        give(run, value=0.2)
    give(run, value=0.2, name="human_2")
    (state, *_) = [state for state in run_states(run.store) if state["state_id"].startswith(f"{THIRD}:")]
    assert state.get("late_rewards") == {"human": 0.7, "human_2": 0.2}


@pytest.mark.parametrize(
    ("rollout", "words"),
    [
        ("r01/42/5/0.0.16", "only 16 of outer step 5, numbered from 0"),
        ("r01/42/6/0.0.3", "only 16 of outer step 5"),
        ("r01/43/5/0.0.3", "deleted them with their step"),
        ("r01/42/5/0.1.3", "records no rollouts"),
        ("r02/42/5/0.0.3", "has no rollouts/r02/"),
        ("r01-1/5/0.3", "is not a recorded rollout"),
        ("../../run.json", "is not a recorded rollout"),
        ("r01/٤٢/5/0.0.3", "is not a recorded rollout"),
        ("", "is not a recorded rollout"),
    ],
)
def test_a_rollout_that_does_not_exist(rollout: str, words: str) -> None:
    run = a_run()
    with pytest.raises(ConfigError, match=words):
        give(run, rollout)
    assert run.store.list("rollouts/") == [KEY]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e19])
def test_a_value_that_is_no_reward(value: float) -> None:
    run = a_run()
    with pytest.raises(ConfigError, match=r"Give a number from -1e18 to 1e18"):
        give(run, value=value)
    assert run.store.list("rollouts/") == [KEY]


@pytest.mark.parametrize("name", ["", "a/b", "..", "a.b", "x" * 65, "a b", "é"])
def test_a_name_that_is_no_part_of_a_key(name: str) -> None:
    with pytest.raises(ConfigError, match="letters, digits and _"):
        give(a_run(), name=name)


@pytest.mark.parametrize("spoiled", [b"", b"\n", b"x\n{}\n", "flipped", "of another run"])
def test_a_bundle_that_is_torn_takes_no_reward(spoiled: Any) -> None:
    run = a_run()
    body = bytearray(run.store.get(KEY) or b"")
    body[len(body) // 3] ^= 1
    run = replace(run, record=replace(run.record, nonce="m")) if spoiled == "of another run" else run
    if spoiled != "of another run":
        run.store.put(KEY, bytes(body) if spoiled == "flipped" else spoiled)
    with pytest.raises(ConfigError, match=r"cannot be used|is damaged, or of another run"):
        give(run)
    assert run.store.list("rollouts/") == [KEY]


def test_an_answer_that_is_lost_costs_nothing() -> None:
    class Lossy(MemoryStore):
        def create(self, key: str, body: Any) -> None:
            super().create(key, body)
            if key.endswith(".reward"):
                raise StoreUnclear("the connection broke")

    assert give(a_run(Lossy("memory://lossy"))).value == 0.7


# reading


def states_of(run: Run) -> dict[str, dict[str, float]]:
    """The late rewards by rollout, of those that have some."""
    states = list(run_states(run.store))
    return {s["state_id"].rpartition(":")[0]: s["late_rewards"] for s in states if "late_rewards" in s}


def test_traces_and_the_report_show_both_rewards() -> None:
    run = a_run()
    for i in range(4):
        give(run, f"r01/42/5/0.0.{i}", i / 2)
    assert states_of(run) == {f"r01/42/5/0.0.{i}": {"human": i / 2} for i in range(4)}
    trained = [float(row.sum()) for row in bundle().rewards[:4]]
    assert {s.get("reward") for s in run_states(run.store)} == set(map(float, bundle().rewards.sum(1)))
    assert count_late_rewards(run.store) == {"human": {"rollouts": 4, "mean": 0.75, "trained_on": sum(trained) / 4}}


HOSTILE = {
    "torn": b'{"kind":"reward","name":"hu',
    "empty": b"",
    "of another bundle": {"of": "another"},
    "NaN": b'{"at":0,"kind":"reward","name":"human","nonce":"x","of":"%s","recorded":0,"rollout":3,"value":NaN,'
    b'"wire":2}',
    "huge": {"value": 1e300},
    "a text": {"value": "7"},
    "another rollout's": {"rollout": 4},
    "no rollout": {"rollout": -1},
    "another name's": {"name": "you"},
    "long": b" " * (17 << 10),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_record_that_is_none_is_left_out_and_named(case: str) -> None:
    run, body = a_run(), HOSTILE[case]
    honest = json.loads(give(run).encode())
    if isinstance(body, dict):
        body = json.dumps({**honest, **body}).encode()
    run.store.put(REWARD, body.replace(b"%s", honest["of"].encode()))
    give(run, "r01/42/5/0.0.5")
    with pytest.warns(TraceWarning, match=r"0000\.0\.0003\.human\.reward: .* is left out"):
        assert states_of(run) == {"r01/42/5/0.0.5": {"human": 0.7}}
    with pytest.warns(TraceWarning):
        assert count_late_rewards(run.store)["human"]["rollouts"] == 1


def test_a_reward_of_a_rollout_that_its_bundle_does_not_have_is_not_counted() -> None:
    run = a_run()
    stray = replace(give(run), rollout=9999)
    run.store.put(stray.key(KEY), stray.encode())
    with pytest.warns(TraceWarning, match=r"0000\.0\.9999\.human\.reward: its bundle has \d+ rollouts"):
        assert count_late_rewards(run.store)["human"]["rollouts"] == 1


def changed_record(body: bytes, **changes: Any) -> bytes:
    record, payload = read_record(body)
    return seal_bundle(bytes(payload), replace(record, **changes))


UNUSABLE: dict[str, tuple[Any, str]] = {
    "another payload": (lambda body: b"\1" + body[1:], "its bytes have another digest"),
    "another run": (lambda body: changed_record(body, run="other"), "it is of another run, other"),
    "more rollouts": (lambda body: changed_record(body, rollouts=10**9), "its record says 1000000000 of"),
    "more tokens": (lambda body: changed_record(body, tokens=2**53), "its record says .* of 9007199254740992"),
    "empty": (lambda body: b"", "no bundle of rollouts"),
}


@pytest.mark.parametrize(("spoil", "words"), UNUSABLE.values(), ids=UNUSABLE)
def test_a_bundle_that_is_not_what_was_recorded_is_no_trace(spoil: Any, words: str) -> None:
    """All but the last were frozen without a word."""
    run = a_run()
    whole = run.store.get(KEY) or b""
    run.store.put(KEY.replace("0000.0.", "0000.1."), whole)
    run.store.put(KEY, spoil(whole))
    with pytest.warns(TraceWarning, match=f"0000.0.bundle: .*{words}"):
        assert {state["state_id"].split(".")[1] for state in run_states(run.store, "n")} == {"1"}


@pytest.mark.parametrize("kind", ["name", "fifo", "link"])
def test_one_foreign_file_below_rollouts_hides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """One such name ended `report` and `traces` with an error."""
    run = a_run(FileStore(tmp_path / "run"))
    give(run)
    folder = (tmp_path / "run" / KEY).parent
    odd = folder / {"name": "0000.0.0000.\x1b[31mx.reward", "fifo": "0000.1.bundle", "link": "0000.2.bundle"}[kind]
    if kind == "name":
        odd.write_bytes(b"{}")
        odd.with_suffix(".bundle").write_bytes(b"{}")
    else:
        os.mkfifo(odd) if kind == "fifo" else odd.symlink_to(folder / "0000.0.bundle")
    run.store.put(layout.RUN, run.record.encode())
    write_control(run.store, ManualClock(), replicas=2, steps=9, min_replicas=1)
    assert main(["traces", run.store.root.as_posix(), "--to", str(tmp_path / "t.jsonl")]) == 0
    told = capsys.readouterr()
    assert f"wrote {len(run_states_quietly(run))} states" in told.out
    assert "warning: rollouts/" in told.err and "It is left out" in told.err
    assert "late_rewards.py" not in told.err and "\x1b" not in told.err
    assert main(["report", run.store.root.as_posix(), "--to", str(tmp_path)]) == 0
    assert "late rewards by human: rollouts 1" in capsys.readouterr().out


def run_states_quietly(run: Run) -> list[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TraceWarning)
        return list(run_states(run.store, "n"))


@pytest.mark.parametrize(
    "key",
    ["rollouts/x.reward", "rollouts/r01/.reward", "rollouts/r01/0000000042/a.b.c.d.reward", "rollouts/../x.reward"],
)
def test_keys_that_no_writer_of_ours_makes(key: str) -> None:
    run = a_run()
    body = give(run).encode()
    listed = run.store.list
    run.store.list = lambda prefix: [*listed(prefix), key]  # type: ignore[method-assign]
    get = run.store.get
    run.store.get = lambda name: body if name == key else get(name)  # type: ignore[method-assign]
    with pytest.warns(TraceWarning, match="left out"):
        assert states_of(run) == {THIRD: {"human": 0.7}}


def test_a_bundle_that_lies_in_another_place_is_left_out() -> None:
    run = a_run()
    run.store.put(KEY.replace("r01", "r02"), run.store.get(KEY) or b"")
    with pytest.warns(TraceWarning, match="r02/0000000042/0000.0.bundle: it is of r01, generation 42"):
        names = [state["state_id"] for state in run_states(run.store)]
    assert len(set(names)) == len(names) and {name[:4] for name in names} == {"r01/"}


def test_two_attempts_of_one_step_have_names_of_their_own() -> None:
    """Before: an actor's bundle that was doubted and the replica's had the same state_ids, which no replay took."""
    run = a_run()
    run.store.put(KEY.replace("0000.0.", "0000.1."), run.store.get(KEY) or b"")
    names = [state["state_id"] for state in run_states(run.store)]
    assert len(set(names)) == len(names) and {name.split(".")[1] for name in names} == {"0", "1"}


def test_rollouts_of_an_actor_that_a_replica_doubted_are_no_traces() -> None:
    """Before: pairs were made of a false actor's rollouts, with the rewards that it wrote."""
    store = (run := a_run()).store
    sampled = replace(bundle(), logprobs=[[-1.0] * len(ids) for ids in bundle().ids])
    at = [HERE._replace(generation=g) for g in (50, 51, 52, 53)]
    for place in at:
        assert places(store, by=0, actor="a01").deliver(place, sampled)
        assert places(store, by=0, actor="a02").deliver(place._replace(bundle=1), sampled)
    for place, doubts in zip(at, ("too far", "", "too far"), strict=False):
        key = layout.bundle_key("r01", place.generation, 0, 0)
        said = RolloutVerdict("x", "a01", by=1, step=5, disagreement=1.0, surprise=9.0, doubts=doubts, nonce="n")
        store.put(layout.beside_bundle(key, "verdict"), said.encode())
    store.put(KEY.replace("bundle", "verdict"), b"no verdict")
    with pytest.warns(TraceWarning, match="r01 doubted rollouts of the actor a01 .*it refused are left out") as told:
        names = {state["state_id"].rpartition(".")[0] for state in run_states(store, run.record.nonce)}
    assert names == {"r01/42/5/0.0", "r01/51/5/0.0", *(f"r01/{g}/5/1.0" for g in (50, 51, 52, 53))}
    assert len({str(one.message) for one in told}) == 1, "the command prints it once"


def test_what_is_pushed_to_the_hub_is_the_logs_sample_and_no_bundle(tmp_path: Path) -> None:
    run = a_run()
    assert freeze(run.store, tmp_path / "all.jsonl", "n")["states"] > 0
    with pytest.raises(ConfigError, match="logged no rollouts"):
        freeze(run.store, tmp_path / "sample.jsonl", "n", sampled=True)


def test_a_file_stays_as_it_was_if_a_row_cannot_be_written(tmp_path: Path) -> None:
    (path := tmp_path / "states.jsonl").write_text("before")
    with pytest.raises(ZeroDivisionError):
        save_lines(({"a": 1 / (1 - i)} for i in range(2)), path)
    assert path.read_text() == "before"


# training does not see them


def test_a_replacement_finds_the_bundle_as_it_was() -> None:
    run = a_run()
    give(run, value=-5.0)
    found = places(run.store, by=2).find(HERE, FITS)
    assert found is not None and found.pack() == bundle().pack()


def test_it_goes_with_its_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    run = a_run()
    give(run)
    monkeypatch.setattr("diloco.replica.old_bundles.read_reach", lambda _: Reach(8))
    OldBundles(run.store, "r01", Inline(), no_emit).note(BundlePlace(7, 44, 0))
    assert run.store.list("rollouts/") == []
    with pytest.raises(ConfigError, match="deleted them with their step"):
        give(run)


# under a run key


def test_under_a_run_key_only_its_holders_give_rewards() -> None:
    bucket = MemoryStore("memory://sealed")
    sealed = under_key(bucket, ManualClock(), b"a key that nobody guesses")
    told: list[Any] = []
    assert isinstance(sealed, SignedStore)
    sealed.emit = lambda event, **fields: told.append((event, fields["record"]))
    run = a_run(sealed)
    give(run)
    assert b'"seal":"' in (bucket.get(REWARD) or b"") and states_of(run) == {THIRD: {"human": 0.7}}
    bucket.put(REWARD.replace(".0003.", ".0004."), bucket.get(REWARD) or b"")  # a true record, in another place
    bucket.put(REWARD.replace("human", "liar"), replace(give(run), name="liar").encode())  # without the key
    with pytest.warns(TraceWarning, match="left out"):
        assert states_of(run) == {THIRD: {"human": 0.7}}
    assert told == [("forged", "reward")] * 2


def test_a_bucket_that_refuses_is_an_error() -> None:
    run = a_run()
    with pytest.raises(StoreRefused):
        give(replace(run, store=Trouble(run.store, StoreRefused("read only"))))


# pairs


def state(rollout: int, action: str, reward: float | None, place: str = "r01/42/5/0.0", **more: Any) -> Any:
    late = {} if reward is None else {"late_rewards": {"human": reward}}
    asked = [{"role": "user", "content": "q"}]
    return {"state_id": f"{place}.{rollout}:1", "state_messages": asked, "student_action": action, **late, **more}


def test_the_better_action_of_one_state_is_chosen() -> None:
    states = [state(0, "A", 1.0), state(1, "A ", 0.0), state(2, "B", 0.25), state(3, "C", 0.0), state(4, "D", None)]
    (pair,) = reward_pairs(states, "human")
    assert (pair["chosen"], pair["rejected"], pair["n_teachers_agreeing"]) == ("A", "C", 1)  # A: ½, twice
    assert pair["state_id"] == "r01/42/5/0.0.3:1" and pair["state_messages"] == states[0]["state_messages"]
    assert reward_pairs(states, "nightly") == []


@pytest.mark.parametrize(
    "states",
    [
        [],
        [state(0, "A", 1.0)],
        [state(0, "A", 1.0), state(1, "A", 0.0)],
        [state(0, "A", 1.0), state(1, "B", 1.0)],
        [state(0, "A", 1.0), state(1, "B", 0.0, place="r01/43/5/0.0")],
        [state(0, "A", 1.0), state(1, "B", 0.0, state_messages=[{"role": "user", "content": "another"}])],
        [state(0, "A\x1b[2J", 1.0), state(1, "B", 0.0)],
    ],
    ids=["none", "one", "one-action", "equal", "another-group", "another-state", "unfit"],
)
def test_where_there_is_no_pair(states: list[Any]) -> None:
    assert reward_pairs(states, "human") == []


def test_pairs_ask_whose_rewards(tmp_path: Path) -> None:
    save_states([state(0, "A", 1.0), state(1, "B", 0.0)], tmp_path / "t.jsonl")
    assert write_pairs(tmp_path / "t.jsonl", tmp_path / "p.jsonl", None) == 1
    with pytest.raises(ConfigError, match=r"late rewards were given by human\. Choose one with --by"):
        write_pairs(tmp_path / "t.jsonl", tmp_path / "p.jsonl", "you")
    both = state(0, "A", 1.0) | {"late_rewards": {"human": 1.0, "nightly": 0.0}}
    save_states([both], tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="late rewards were given by human, nightly"):
        write_pairs(tmp_path / "t.jsonl", tmp_path / "p.jsonl", None)
    save_states([state(0, "A", None)], tmp_path / "t.jsonl")
    for name in (None, "you"):
        with pytest.raises(ConfigError, match="no rollout of this run has a late reward, so there is no pair"):
            write_pairs(tmp_path / "t.jsonl", tmp_path / "p.jsonl", name)
    save_states([state(0, "A", 1.0)], tmp_path / "t.jsonl")
    with pytest.raises(ConfigError, match="no two actions in one state"):
        write_pairs(tmp_path / "t.jsonl", tmp_path / "p.jsonl", None)


# the commands


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, to, pairs = str(tmp_path / "run"), str(tmp_path / "traces.jsonl"), str(tmp_path / "pairs.jsonl")
    config = load_config(Path(__file__).parents[2] / "diloco" / "demo.toml", ["fleet.record_rollouts=true"])
    run = open_run(config, url, ManualClock())
    places(FileStore(tmp_path / "run"), run=run.record.nonce).put(HERE, bundle(), FITS)
    for i in range(16):
        value = float(bundle().rewards[i].sum())
        assert main(["reward", url, "--rollout", f"r01/42/5/0.0.{i}", "--value", str(-value), "--name", "human"]) == 0
    said = capsys.readouterr().out
    assert "human gives -1 to r01/42/5/0.0." in said and "Training used 1 for it, and keeps that value" in said
    assert main(["reward", url, "--rollout", THIRD, "--value", "9", "--name", "human"]) == 2
    assert "--name human_2" in capsys.readouterr().err
    assert main(["reward", url, "--rollout", THIRD, "--value", "nan", "--name", "human"]) == 2
    assert main(["reward", url, "--rollout", THIRD, "--value", "8", "--name", "x", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["value"] == 8
    assert main(["traces", url, "--to", to, "--pairs", pairs]) == 2
    assert "late rewards were given by human, x" in capsys.readouterr().err
    assert main(["traces", url, "--to", to, "--pairs", pairs, "--by", "human", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pairs"] == len(training_pairs(pairs)) > 0
    assert main(["report", url, "--to", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    trained = float(bundle().rewards.sum(1).mean())
    assert (
        f"late rewards by human: rollouts 16, mean {-trained:.3g}; in training they had a mean of {trained:.3g}" in said
    )
    assert main(["report", url, "--to", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["late_rewards"]["x"]["mean"] == 8


@pytest.mark.parametrize("trace", ["verdict", "claim", "none"])
def test_an_actors_bundle_that_is_gone_is_no_fault_of_the_replica(trace: str) -> None:
    """The audit made the rollouts again, which only a session's own seeds can, and said that the replica lied."""
    run, bundle_key = a_run(), KEY
    run.store.delete([bundle_key])
    if trace == "verdict":
        run.store.put(layout.beside_bundle(bundle_key, "verdict"), b"{}")
    elif trace == "claim":
        run.store.put(layout.claim_key("a00", 1), b"{}")
    recorded = _Recorded(run, run.store, Holder("r01", 1), to := Recomputed(), began=0)
    assert recorded.find(HERE, FITS) is None and not to.off
    gone = f"{bundle_key} is gone or cannot be used; its rollouts may be from an actor"
    assert recorded.lost == ("" if trace == "none" else gone)


def test_an_empty_bundle_is_no_missing_one() -> None:
    run = a_run()
    run.store.put(KEY, b"")
    recorded = _Recorded(run, run.store, Holder("r01", 1), to := Recomputed(), began=0)
    assert recorded.find(HERE, FITS) is None
    assert to.off == [(HERE.outer, KEY, "r01", "it is empty, or does not have the run's tag")]
