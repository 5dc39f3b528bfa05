"""`diloco bisect` and `diloco blame`: a planted bad replica is found, and named, by a reader without write access."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from math import ceil, log2
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diloco.audit.bisect import Judgement, bisect, most_judgements
from diloco.audit.blame import REPLICA, STEP, Blame, Omission, blame, blame_lines, states_without
from diloco.audit.metrics import LOWER, Measurement
from diloco.model.export import model_record, patient, put_into, start_folder, state_at
from diloco.model.fetch import fetch_files
from diloco.outer.optimizer import OuterState
from diloco.run.config import ConfigError
from diloco.run.record import read_run
from executors.cli.main import main, split_command
from inner.train.build import load_start
from inner.train.supervised import text_losses
from rendezvous import layout
from tests.support.fakes import Fault, FaultyStore
from tests.support.puppets import PuppetRun, toward

GOOD, BAD, UNCLEAR = Judgement.GOOD, Judgement.BAD, Judgement.UNCLEAR
SINCE = 17  # the planted replica turns its sign from this outer step on
KEPT = {"fleet": {"keep": "all"}}


# -------------------------------------------------------------------- the search


def judged_from(
    change: int, unclear: tuple[int, ...] = (), asked: list[int] | None = None
) -> Callable[[int], Judgement]:
    def judge(step: int) -> Judgement:
        if asked is not None:
            asked.append(step)
        return UNCLEAR if step in unclear else BAD if step >= change else GOOD

    return judge


@pytest.mark.parametrize("last", [1, 2, 3, 7, 8, 9, 64, 65])
def test_every_change_is_found_in_as_few_judgements_as_there_can_be(last: int) -> None:
    for change in range(1, last + 1):
        asked = list[int]()
        found = bisect(range(last + 1), judged_from(change, asked=asked))
        assert (found.before, found.after) == (change - 1, change) and found.steps == range(change - 1, change)
        assert len(asked) - 2 <= ceil(log2(last)) == most_judgements(range(last + 1)) if last > 1 else len(asked) == 2


def test_the_first_good_one_is_found_as_well() -> None:
    found = bisect(range(10), lambda t: GOOD if t >= 6 else BAD)
    assert (found.before, found.after) == (5, 6)
    assert found.lines("runs/x")[0] == "θ_6 is the first that is good: outer step 5 made it from θ_5"


def test_steps_that_cannot_be_judged_or_are_gone_leave_a_stretch() -> None:
    found = bisect([0, 4, 5, 6, 8, 9, 10], judged_from(8, unclear=(6,)))
    assert (found.before, found.after, found.unclear, found.gone) == (5, 8, (6,), (7,))
    assert found.lines("runs/x")[:3] == [
        "θ_5 is good, θ_8 is bad: one of the outer steps 5 to 7 between them caused it",
        "θ of 6 could not be judged",
        "θ of 7 is not kept any more (fleet.keep)",
    ]


@pytest.mark.parametrize(("unclear", "change"), [((3,), 1), ((1, 2, 3), 4), ((4, 5), 6), (tuple(range(1, 9)), 9)])
def test_unclear_ones_never_hide_a_clear_change(unclear: tuple[int, ...], change: int) -> None:
    found = bisect(range(10), judged_from(change, unclear))
    assert found.before < change <= found.after and not set(range(found.before + 1, found.after)) - set(unclear)


@pytest.mark.parametrize(
    ("judge", "words"),
    [
        (lambda t: BAD, r"finds θ_0 bad and θ_9 bad, too.*Try the command by hand"),
        (lambda t: GOOD, r"finds θ_0 good and θ_9 good, too"),
        (lambda t: UNCLEAR if t == 9 else GOOD, r"cannot say whether θ_9 is good \(exit code 125\)"),
    ],
)
def test_ends_that_do_not_differ(judge: Callable[[int], Judgement], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        bisect(range(10), judge)


# -------------------------------------------------------------------- what is left out


def planted(folder: Path, replicas: int = 3, since: int = SINCE, steps: int = SINCE + 5, **changes: Any) -> PuppetRun:
    """r01 turns its sign from one step on."""
    folder.mkdir(exist_ok=True)
    run = PuppetRun(folder, replicas, **{**KEPT, **changes})
    honest = run.delta
    run.delta = lambda slot, step, state: honest(slot, step, state) * (-1 if slot == "r01" and step >= since else 1)
    run.rounds(steps)
    return run


def without(run: PuppetRun, first: int, last: int, omission: Omission) -> OuterState:
    found = read_run(run.url)
    (one,) = states_without(found, model_record(found), first, last, [omission])
    return one.state


def theta(run: PuppetRun, step: int) -> OuterState:
    found = read_run(run.url)
    return state_at(found, model_record(found), step)[1]


def same(a: OuterState, b: OuterState) -> bool:
    theirs = b.all_arrays()
    return all(np.array_equal(array, theirs[name]) for name, array in a.all_arrays().items())


@pytest.mark.slow
def test_without_a_replica_it_is_the_run_that_never_had_it(tmp_path: Path) -> None:
    run = planted(tmp_path / "three", since=2, steps=5)
    (tmp_path / "two").mkdir()
    other = PuppetRun(tmp_path / "two", 2, **KEPT)
    aim = toward(run.goal)
    other.delta = lambda slot, step, state: aim({"r00": "r00", "r01": "r02"}[slot], step, state)
    other.rounds(5)
    assert same(without(run, 0, 5, Omission(slot="r01")), theta(other, 5))
    assert same(without(run, 0, 5, Omission(slot="nobody")), theta(run, 5))


def test_without_a_step_it_is_the_run_that_stood_still_there(tmp_path: Path) -> None:
    run = planted(tmp_path / "run", since=99, steps=5)
    (tmp_path / "still").mkdir()
    still = PuppetRun(tmp_path / "still", 3, **KEPT)
    moves = still.delta
    still.delta = lambda slot, step, state: moves(slot, step, state) * (0 if step == 3 else 1)
    still.rounds(5)
    assert same(without(run, 1, 5, Omission(step=3)), theta(still, 5))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "changes", [{"outer": {"fragments": 2}}, {"outer": {"codec": "int8"}}, {"outer": {"lr": "auto"}}]
)
def test_fragments_codecs_and_auto(tmp_path: Path, changes: dict[str, Any]) -> None:
    run = planted(tmp_path / "run", since=3, steps=6, **changes)
    assert same(without(run, 2, 6, Omission(slot="nobody")), theta(run, 6))
    found = blame(read_run(run.url), 2, 6, DistanceTo(run.goal))
    assert found.harm is not None and found.harm.name == "r01"


@pytest.mark.slow
def test_late_work_is_left_out_where_it_was_counted(tmp_path: Path) -> None:
    run = PuppetRun(tmp_path, **KEPT)
    run.round()
    run.round("r00", "r01")
    run.catch_up("r02")
    run.rounds(2)
    found = read_run(run.url)
    (one,) = states_without(found, model_record(found), 0, 4, [Omission(slot="r02")])
    assert one.left_out == sum(o.slot == "r02" for commit in run.fleet.commits() for o in commit.offers) == 4


# -------------------------------------------------------------------- the planted replica


class DistanceTo:
    """A loss: how far θ has still to go.   Every pseudogradient of an honest puppet goes there."""

    name, better = "distance", LOWER

    def __init__(self, goal: np.ndarray) -> None:
        self.goal = goal

    def measure(self, step: int, state: OuterState) -> Measurement:
        return Measurement(-float(np.dot(torch.cat(state.thetas).numpy().astype(np.float64), self.goal)))


def blamed(run: PuppetRun, first: int, last: int, by: str = REPLICA, metric: bool = True) -> Blame:
    return blame(read_run(run.url), first, last, DistanceTo(run.goal) if metric else None, by)


def test_the_planted_replica_is_named(tmp_path: Path) -> None:
    run = planted(tmp_path / "run")
    before = {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()}
    found = blamed(run, SINCE, SINCE + 5)
    assert found.harm is not None and found.harm.name == "r01" == found.ranked[0].name
    assert {one.left_out for one in found.without} == {5}
    assert "r01 did most harm: without it, the number would be" in "\n".join(blame_lines(found))
    assert blamed(run, 0, SINCE).harm is None  # no replica did harm before
    assert "nothing is to blame" in "\n".join(blame_lines(blamed(run, 0, SINCE)))
    unmeasured = blame_lines(blamed(run, SINCE, SINCE + 2, metric=False))
    assert "r01 pulled against the others" in unmeasured and "without r01" in unmeasured[0]
    assert {p: p.read_bytes() for p in run.folder.rglob("*") if p.is_file()} == before


def test_of_two_that_pull_apart_only_a_number_knows_who_is_wrong(tmp_path: Path) -> None:
    run = planted(tmp_path / "run", replicas=2, since=3, steps=6)
    lines = blame_lines(blamed(run, 3, 6, metric=False))
    assert any(line.startswith("two replicas pull against each other; only a number can say") for line in lines)
    found = blamed(run, 3, 6)
    assert found.harm is not None and found.harm.name == "r01"


def test_the_step_is_named_in_which_all_went_astray(tmp_path: Path) -> None:
    run = PuppetRun(tmp_path, **KEPT)
    honest = run.delta
    run.delta = lambda slot, step, state: honest(slot, step, state) * (-5 if step == 4 else 1)
    run.rounds(8)
    found = blamed(run, 1, 8, STEP)
    assert found.harm is not None and found.harm.name == "step 4"


def test_a_start_model_and_code_are_read_again_after_a_broken_connection(tmp_path: Path) -> None:
    """`export` replayed θ through an outage, and ended at the first file of the start model that broke off."""
    run = PuppetRun(tmp_path, **KEPT)
    faulty = FaultyStore(run.run.store, [Fault("get", "model/"), Fault("get", "code/")])
    broken = replace(run.run, store=faulty)
    assert (start_folder(broken, run.fleet.model, tmp_path / "start") / "config.json").is_file()
    assert fetch_files(patient(broken), tmp_path / "code").keys() == run.run.record.files.keys()
    assert not [fault for fault in faulty.faults if fault.times > 0], "both faults were met"


def start_model(run: PuppetRun) -> Any:
    folder = start_folder(run.run, run.fleet.model, run.fleet.folder / "start")
    return load_start(folder, "float32", None)[0]


def descending(run: PuppetRun, liar: str) -> Callable[[str, int, OuterState], np.ndarray]:
    """Real gradients of the run's model on its text, of which one replica turns the sign."""
    model = start_model(run)
    ids = torch.arange(64).view(4, 16) % model.config.vocab_size

    def delta(slot: str, step: int, state: OuterState) -> np.ndarray:
        put_into(model, state)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad and p.grad is not None])
        return (0.3 * found * (-3 if slot == liar else 1)).numpy()

    return delta


@pytest.mark.slow
def test_a_supervised_run_is_judged_by_its_own_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = PuppetRun(tmp_path, **KEPT)
    run.delta = descending(run, "r02")
    run.rounds(4)
    ids = tmp_path / "held-out.npy"
    np.save(ids, np.arange(16))
    assert main(["blame", run.url, "--text", str(ids)]) == 2
    assert "has 16 tokens; the loss needs 17. Name a longer text" in capsys.readouterr().err
    long = np.tile(np.arange(16), 40)
    np.save(ids, long)
    assert main(["blame", run.url, "--text", str(ids), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["harm"] == "r02" and told["metric"] == f"loss on {ids}" and told["better"] == "lower"
    assert told["from"] == 0 and told["to"] == 4
    assert main(["blame", run.url, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metric"] == "loss on the run's text"


def test_the_losses_are_those_of_transformers(tmp_path: Path) -> None:
    model = start_model(PuppetRun(tmp_path, 1))
    tokens = np.arange(33) % model.config.vocab_size
    windows = [torch.from_numpy(tokens[at : at + 17])[None] for at in (0, 16)]
    theirs = [float(model(input_ids=ids, labels=ids).loss) for ids in windows]
    assert text_losses(model, tokens, 16) == pytest.approx(theirs, rel=1e-6)
    assert text_losses(model, tokens[:16], 16) == []


def test_changes_are_compared_in_pairs() -> None:
    before, after = Measurement(2.0, 0.5, (1.0, 3.0)), Measurement(1.8, 0.5, (0.8, 2.8))
    assert after.change_from(before) == (pytest.approx(-0.2), pytest.approx(0.0, abs=1e-12))
    assert Measurement(1.0, 3.0).change_from(Measurement(0.0, 4.0)) == (1.0, 5.0)


@pytest.mark.slow
def test_deltas_that_were_collected(tmp_path: Path) -> None:
    run = planted(tmp_path / "run", since=99, steps=6)
    for path in run.folder.glob("steps/*/delta/*.bin"):
        path.unlink()
    found = blamed(run, 1, 6, STEP)
    assert all(one.measured for one in found.without) and not any(one.inseparable for one in found.without)
    lines = blame_lines(blamed(run, 4, 6))
    assert "not separated: the deltas of step 4, 5 are gone or damaged, so their whole means were used" in lines


# -------------------------------------------------------------------- as it is typed

JUDGE = """
import json, os, sys
import numpy as np
from safetensors.numpy import load_file
found = load_file(os.path.join(os.environ["DILOCO_MODEL"], "model.safetensors"))
print("judged", sys.argv[1])
length = sum(float(np.abs(a).sum()) for a in found.values())
open(sys.argv[2], "a").write(f"{os.environ['DILOCO_STEP']} {length}\\n")
sys.exit(0 if int(os.environ["DILOCO_STEP"]) < 18 else 1)
"""


@pytest.mark.slow
def test_bisect_as_it_is_typed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = planted(tmp_path / "run", steps=40)
    (tmp_path / "judge.py").write_text(JUDGE)
    notes = tmp_path / "notes"
    words = ["bisect", run.url, "--", sys.executable, str(tmp_path / "judge.py"), "{step}", str(notes)]
    assert main(words) == 0
    out, err = capfd.readouterr()
    assert out.splitlines()[0] == f"θ_{SINCE + 1} is the first that is bad: outer step {SINCE} made it from θ_{SINCE}"
    assert f"  diloco blame {run.url} --from {SINCE} --to {SINCE + 1}" in out.splitlines()
    assert "judges the two ends of 41 θ, from θ_0 to θ_40, then at most 6 more" in err and "judged 40" in err
    asked = [line.split() for line in notes.read_text().splitlines()]
    assert len(asked) <= 2 + ceil(log2(40)) and len({length for _, length in asked}) == len(asked)


EXPLAINS = """
import json, os, subprocess, sys
step = int(os.environ["DILOCO_STEP"])
if step == 0:
    sys.exit(0)
words = ["explain", os.environ["DILOCO_RUN"], "--step", str(step - 1), "--json"]
told = subprocess.run([sys.executable, "-m", "executors.cli.main", *words], capture_output=True, check=True).stdout
parts = json.loads(told)["effect"]["parts"]
sys.exit(any(part["cosine"] < 0 for part in parts))
"""


@pytest.mark.slow
def test_a_turned_sign_is_found_by_asking_explain(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = planted(tmp_path / "run", steps=40)
    (tmp_path / "judge.py").write_text(EXPLAINS)
    assert main(["bisect", run.url, "--json", "--", sys.executable, str(tmp_path / "judge.py")]) == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["before"], told["after"]) == (SINCE, SINCE + 1) and len(told["judged"]) <= 2 + ceil(log2(40))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bisect"], "needs a command that says by its exit code"),
        (["bisect", "--", "no-such-command"], "the command 'no-such-command' cannot be run: No such file"),
        (["bisect", "--", "sh", "-c", "kill -9 $$"], "ended with code -9 on θ_0"),
        (["bisect", "--", "true"], "finds θ_0 good and θ_3 good, too"),
        (["bisect", "--from", "2", "--to", "2", "--", "true"], "there is nothing to search: this range has 1 θ"),
        (["bisect", "--to", "9", "--", "true"], "step 9 has not been taken yet: the run is at step 3"),
        (["bisect", "--merge", "--", "true"], "this run has no [inner.lora]"),
        (["blame", "--", "echo", "no number"], "printed 'number' last on θ_0; it has to be a number"),
        (["blame", "--", "false"], "ended with code 1 on θ_0; it has to print a number"),
        (["blame", "--from", "2", "--to", "1"], "there is no outer step from θ_2 to θ_1"),
        (["blame", "--to", "9"], "step 9 has not been taken yet"),
        (["blame", "--text", "nowhere.txt"], "there is no file nowhere.txt"),
        (["blame", "--no-metric", "--", "true"], "--no-metric and -- COMMAND exclude each other"),
    ],
)
def test_what_cannot_be_done(
    tmp_path_factory: pytest.TempPathFactory, capfd: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    run = short_run(tmp_path_factory)
    assert main([words[0], run.url, *words[1:]]) == 2
    assert said in capfd.readouterr().err


_SHORT: list[PuppetRun] = []


def short_run(factory: pytest.TempPathFactory) -> PuppetRun:
    """Three outer steps; no test writes to it."""
    if not _SHORT:
        _SHORT.append(planted(factory.mktemp("short"), since=99, steps=3))
    return _SHORT[0]


def test_a_number_by_a_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = planted(tmp_path / "run", since=1, steps=3)
    assert main(["blame", run.url, "--from", "1", "--", "sh", "-c", "wc -c < {model}/model.safetensors"]) == 0
    out = capfd.readouterr().out
    assert "moved the number most" in out and "not known: what the others would have sent" in out


def test_only_bisect_and_blame_take_a_command() -> None:
    assert split_command(["bisect", "R", "--", "a", "--", "b"]) == (["bisect", "R"], ["a", "--", "b"])
    assert split_command(["status", "R", "--", "x"]) == (["status", "R", "--", "x"], [])
    assert split_command([]) == ([], [])


@pytest.mark.slow
def test_a_run_that_keeps_little_is_searched_where_it_can_be(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = planted(tmp_path / "run", since=99, steps=12, fleet={"keep": "2 MB"})
    for t in range(6):
        for path in run.folder.glob(f"{layout.snapshot_key(t).rpartition('/')[0]}/*.safetensors"):
            path.unlink()
    for path in [p for t in range(6) for p in run.folder.glob(f"steps/{t:010d}/*/*.bin")]:
        path.unlink()
    judge = ["sh", "-c", "test $DILOCO_STEP -lt 9"]
    assert main(["bisect", run.url, "--", *judge]) == 0
    assert "θ_9 is the first that is bad" in capfd.readouterr().out
    assert main(["bisect", run.url, "--from", "3", "--", *judge]) == 2
    assert "θ_3 cannot be computed any more" in capfd.readouterr().err
