"""`train --from OLD[@STEP]`: a run that begins with the weights of another one, and with its clock."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.model.export import model_record, state_at
from diloco.model.fork import begin, read_fork
from diloco.model.publish import publish_model
from diloco.run.config import ConfigError
from diloco.run.founding import open_run
from diloco.run.record import Run, RunRecord, Superseded, read_run, url_below
from diloco.runlog.reader import read_report
from diloco.runlog.summary import summary
from diloco.views.comparison import Comparison, list_changes
from executors.cli.main import main
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.errors import WrongRun
from rendezvous.records.digests import SHA256, digest, hex_of
from rendezvous.store import put_once
from rendezvous.stores.open import open_store
from tests.support.audit import check_run
from tests.support.fleet import Fleet
from tests.support.fleet import config as config_of

TWO = {"replicas": 2, "min_replicas": 2, "keep": "all"}


def bases(run: Run, first: int, last: int) -> list[str]:
    """Digests of θ and momentum before the steps first … last."""
    return [state_at(run, model_record(run), t)[1].digest() for t in range(first, last + 1)]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Four steps; after two of them every replica was replaced.

    A replica that starts late in a run offers the inner steps that it has by then, rightly (h = 3, weight .75), and
    then no replica takes the same steps again: such a run is made once more."""
    for _ in range(5):
        fleet = Fleet(tmp_path_factory.mktemp("old"), fleet={**TWO, "steps": 2})
        fleet.start_all()
        assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
        fleet.end_in(2)
        fleet.start_all()
        assert fleet.wait() == {"r00": [0, 0], "r01": [0, 0]}, fleet.logs()
        if all(offer.h == 4 for commit in fleet.commits() for offer in commit.offers):
            return fleet
    raise AssertionError("five runs, and in each a replica came late")


def forked(folder: Path, spelling: str, momentum: bool = False, **changes: Any) -> Run:
    config = config_of(folder, **changes)
    fork = read_fork(spelling, config, momentum)
    run = open_run(config, str(folder / "run"), SystemClock(), parent=fork.parent)
    begin(run, fork, SystemClock())
    return run


def test_with_nothing_changed_it_takes_the_steps_that_the_other_took(old: Fleet, tmp_path: Path) -> None:
    forked(tmp_path, f"{old.url}@2", momentum=True, fleet={**TWO, "steps": 2})
    fleet = Fleet(tmp_path, fleet={**TWO, "steps": 2})  # finds the run founded, and its model there
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    check_run(tmp_path / "run", 2)
    theirs = bases(read_run(old.url), 2, 4)
    assert bases(fleet.run, 0, 2) == theirs and len(set(theirs)) == 3
    assert main(["verify", fleet.url]) == 0
    assert f"continues from {old.url}@2"[:80] in summary(read_report(open_store(fleet.url)))


def test_without_the_momentum_only_the_weights_come_along(old: Fleet, tmp_path: Path) -> None:
    run = forked(tmp_path, f"{old.url}@2", inner={"lr": 1e-4})
    _, theirs = state_at(read_run(old.url), model_record(old.run), 2)
    _, ours = state_at(run, model_record(run), 0)
    assert torch.equal(ours.thetas[0], theirs.thetas[0])
    assert theirs.optimizers[0].momentum.any() and not ours.optimizers[0].momentum.any()
    parent = run.record.parent
    assert (parent.url, parent.run, parent.step) == (old.url, old.run.record.nonce, 2)
    assert (parent.outer_steps, parent.inner_steps) == (2, 8)
    assert parent.base == theirs.digest()


def test_the_newest_step_and_a_fork_of_a_fork(old: Fleet, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    first = forked(tmp_path, old.url)
    assert first.record.parent.step == 4
    second = forked(tmp_path / "b", f"{first.url}@0")
    assert (second.record.parent.step, second.record.parent.outer_steps, second.record.parent.inner_steps) == (0, 4, 16)
    _, theirs = state_at(first, model_record(first), 0)
    _, ours = state_at(second, model_record(second), 0)
    assert torch.equal(ours.thetas[0], theirs.thetas[0])


def test_a_run_that_was_founded_again_goes_by_its_first_name(old: Fleet, tmp_path: Path) -> None:
    name = str(tmp_path / "first")
    store = open_store(name)
    put_once(store, SystemClock(), layout.commit_key(0), Superseded(nonce="n", at=0.0).encode())
    shutil.copytree(old.url, url_below(name))
    assert read_fork(f"{name}@2", config_of(tmp_path)).parent.url.endswith("/again")


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "another model": ("@2", {"inner": {"dtype": "bfloat16"}}, "'float32', and this config has 'bfloat16'"),
    "other parts": ("@2", {"outer": {"fragments": 2}}, "has outer.fragments = 1, and this config has 2"),
    "a step that was not taken": ("@9", {}, "the run is at step 4. Name that or an earlier step"),
    "no run": ("/nowhere@2", {}, "there is no run at"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_run_that_it_cannot_begin_with(old: Fleet, tmp_path: Path, case: str) -> None:
    more, changes, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        read_fork(old.url + more, config_of(tmp_path, **changes))


def test_in_the_middle_of_a_round(tmp_path: Path) -> None:
    parts = {"outer": {"fragments": 2}, "fleet": {**TWO, "steps": 3}}
    fleet = Fleet(tmp_path, **parts)
    fleet.start_all()
    fleet.wait()
    with pytest.raises(ConfigError, match=r"@3 is in the middle of a round.*has 2 outer steps. Use @2"):
        read_fork(fleet.url, config_of(tmp_path, **parts))


def test_a_copy_that_was_cut_off_is_finished_by_the_same_command_alone(old: Fleet, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    fork = read_fork(f"{old.url}@2", config)
    run = open_run(config, str(tmp_path / "run"), SystemClock(), parent=fork.parent)
    with pytest.raises(ConfigError, match=f"Repeat the command that founded it: diloco train … --from {old.url}@2"):
        publish_model(run, SystemClock())
    assert run.store.get(layout.MODEL_MANIFEST) is None and run.store.get(layout.snapshot_key(0)) is None
    begin(run, fork, SystemClock())
    assert publish_model(run, SystemClock()).files == old.model.files


def test_diff_says_what_differs_and_shows_a_fork_at_the_others_steps(
    old: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes: dict[str, Any] = {"inner": {"lr": 1e-4}, "fleet": {**TWO, "steps": 3}}
    forked(tmp_path, f"{old.url}@2", **changes)
    (tmp_path / "text.txt").write_text((tmp_path / "text.txt").read_text())
    fleet = Fleet(tmp_path, **changes)
    fleet.start_all()
    assert fleet.wait() == {"r00": [0], "r01": [0]}, fleet.logs()
    capsys.readouterr()
    assert main(["diff", old.url, fleet.url]) == 0
    told = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in told[:2]] == ["fleet.steps 2 → 3", "inner.lr not set → 0.0001"]
    steps, there, here = told[3:]
    assert steps.split()[-5:] == ["0", "1", "2", "3", "4"]
    assert len(there.split()) == 1 + 4 and len(here.split()) == 1 + 3
    assert here.index(".") > there.index(".")  # the fork's first column is step 2
    assert main(["diff", old.url, old.url, "--json"]) == 0
    assert '"changes": []' in capsys.readouterr().out


def with_reward(record: RunRecord, spelling: str, body: bytes, **settings: Any) -> RunRecord:
    named = digest(body, SHA256)
    stored = {"digest": named, "key": layout.code_key(hex_of(named), spelling.partition(":")[0])}
    inner = {**record.config["inner"], "rewards": {"function": spelling}, **settings}
    return replace(record, config={**record.config, "inner": inner}, files={**record.files, "reward": stored})


def test_diff_names_the_users_files_and_their_functions(old: Fleet) -> None:
    record = with_reward(old.run.record, "rewards.py:score", b"a")
    assert list_changes(record, with_reward(record, "renamed.py:score", b"a")) == [], "its bytes and function count"
    ((name, there, here),) = list_changes(record, with_reward(record, "rewards.py:score", b"b"))
    assert name == "inner.rewards.function"
    assert there.startswith("rewards.py:score (contents ") and here.startswith("rewards.py:score (contents ")
    assert there != here
    ((_, there, here),) = list_changes(record, with_reward(record, "rewards.py:strict", b"a"))
    assert there.startswith("rewards.py:score") and here.startswith("rewards.py:strict"), "another function of it"
    without = Comparison(list_changes(old.run.record, with_reward(old.run.record, "r.py:f", b"a")), {})
    (told,) = [line.split() for line in without.lines("old", "new") if line.startswith("inner.rewards.function ")]
    assert told[1:5] == ["not", "set", "→", "r.py:f"]


def test_diff_names_the_files_of_two_scripts() -> None:
    """Before: KeyError, a traceback."""

    def record(path: str, body: bytes) -> RunRecord:
        named = digest(body, SHA256)
        files = {f"script/{path}": {"digest": named, "key": layout.code_key(hex_of(named), path)}}
        return RunRecord({"name": "mine", "outer": {}, "script": {"path": path}}, {}, files, "nonce", 0.0)

    ((name, there, here),) = list_changes(record("train.py", b"a"), record("train.py", b"b"))
    assert name == "script/train.py" and there.startswith("train.py (contents ") and there != here
    moved = list_changes(record("train.py", b"a"), record("other.py", b"a"))
    assert [name for name, _, _ in moved] == ["script.path", "script/other.py", "script/train.py"]


def test_a_run_has_one_parent(old: Fleet, tmp_path: Path) -> None:
    forked(tmp_path, f"{old.url}@2")
    with pytest.raises(WrongRun, match=f"continues from {old.url}@2, not from {old.url}@4"):
        forked(tmp_path, f"{old.url}@4")
    assert open_run(config_of(tmp_path), str(tmp_path / "run"), SystemClock()).record.parent.step == 2


def test_the_refusal_of_changed_settings_names_the_way(old: Fleet, tmp_path: Path) -> None:
    with pytest.raises(WrongRun, match=f"diloco train CONFIG --run NEW --from {old.url}"):
        open_run(config_of(tmp_path, inner={"lr": 1e-4}), old.url, SystemClock())


def test_momentum_without_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", str(tmp_path / "x.toml"), "--run", str(tmp_path / "run"), "--momentum"]) == 2
    assert "add --from OLD[@STEP]" in capsys.readouterr().err


def test_a_refused_fork_leaves_nothing_behind(
    old: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config_of(tmp_path)
    Path("run.toml").write_text('[inner]\nloop = "supervised"\nmodel = "tiny"\ndata.text = "text.txt"\n')
    assert main(["train", "run.toml", "--run", "new", "--from", f"{old.url}@9", "--yes"]) == 2
    assert "step 9 has not been taken yet" in capsys.readouterr().err and not Path("new").exists()
