"""A run in which nothing was trained is founded again under its name; one that trained, or lives, is not."""

import subprocess
import sys
from pathlib import Path

import pytest

from diloco.run import record
from diloco.run.config import FleetConfig, load_config
from diloco.run.founding import open_run
from diloco.run.record import read_run
from executors.cli.starting import again, plan
from executors.preflight.run_url import UsageError
from executors.preflight.script import read_script
from executors.supervision.lease import Lease
from rendezvous import layout
from rendezvous.agreement.membership import claim, read_control
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Commit
from rendezvous.errors import WrongRun
from rendezvous.records.records import WireError
from rendezvous.store import put_once
from rendezvous.stores.open import open_store
from tests.executors.test_cli import CONFIG, complaint, config, run, say  # noqa: F401  (fixtures)

CLOCK = SystemClock()


def mended(config: Path) -> Path:  # noqa: F811
    (config.parent / "text.txt").write_text("one two three, mended")
    return config


def founded(config: Path) -> str:  # noqa: F811
    url = str(config.parent / "mine")
    open_run(load_config(config), url, CLOCK)
    return url


def found_again(config: Path, url: str) -> str:  # noqa: F811
    return again.found_again(load_config(config), url, CLOCK, lambda text: None, grace_s=0.0)


def test_the_mended_file_is_founded_under_the_same_name(capsys, config):  # noqa: F811
    url = founded(config)
    with pytest.raises(WrongRun, match="Nothing was trained there yet: the same command with --again"):
        open_run(load_config(mended(config)), url, CLOCK)
    new = found_again(config, url)
    assert new == f"{url}/again" == record.current_url(url)
    open_run(load_config(config), new, CLOCK)
    assert read_control(open_store(url)).stop and not read_control(open_store(new)).stop
    code, out, _ = say(capsys, "status", url, "--json")  # the name stays
    assert code == 0 and '"outer_step": 0' in out
    assert found_again(config, new) == new  # the same config: nothing to do


def test_and_once_more(config):  # noqa: F811
    url = founded(config)
    new = found_again(mended(config), url)
    open_run(load_config(config), new, CLOCK)
    (config.parent / "text.txt").write_text("mended twice")
    newer = found_again(config, record.current_url(url))
    assert newer == f"{url}/again/again" == record.current_url(url)
    open_run(load_config(config), newer, CLOCK)


def test_a_run_that_took_a_step_is_not_founded_again(capsys, run, config):  # noqa: F811
    before = run.store.list("")
    with pytest.raises(UsageError, match="has taken a step with another config"):
        found_again(mended(config), run.url)
    assert run.store.list("") == before  # not even a wish


def test_a_run_that_is_supervised_is_not_founded_again(config):  # noqa: F811
    url = founded(config)
    lease = Lease.take(open_store(url), CLOCK)
    with pytest.raises(UsageError, match=r"is supervised by process .* diloco stop"):
        found_again(mended(config), url)
    assert not record.is_superseded(open_store(url)) and not read_control(open_store(url)).stop
    lease.beat("left")
    assert found_again(config, url).endswith("/again")


def test_a_replica_that_may_still_run_is_named(config, monkeypatch):  # noqa: F811
    from executors.supervision.shutdown import End

    url = founded(config)
    monkeypatch.setattr(again, "stop_run", lambda *_: [End("r00-1", True, "its heartbeat moves")])
    with pytest.raises(UsageError, match=r"is not created again: r00-1 may still run"):
        found_again(mended(config), url)
    assert not record.is_superseded(open_store(url))


def test_a_step_that_is_committed_while_we_look_wins(config, run, monkeypatch):  # noqa: F811
    """The register decides: between the last look and the Superseded, a sleeper commits step 0."""
    url, commit = founded(config), run.store.get(layout.commit_key(0))

    def sleeper_wakes(*_: object) -> list[object]:
        open_store(url).put(layout.commit_key(0), commit)
        return []

    monkeypatch.setattr(again, "stop_run", sleeper_wakes)
    with pytest.raises(UsageError, match="has taken a step"):
        found_again(mended(config), url)
    assert open_store(url).get(layout.commit_key(0)) == commit and record.current_url(url) == url


def test_a_sleeper_of_the_first_founding_can_never_commit(config, run):  # noqa: F811
    url, commit = founded(config), run.store.get(layout.commit_key(0))
    store = open_store(url)
    claim(store, CLOCK, "r00", host="elsewhere", pid=7)
    found_again(mended(config), url)
    won, stands = put_once(store, CLOCK, layout.commit_key(0), commit)
    assert not won
    with pytest.raises(WireError, match="found a superseded"):
        Commit.decode(stands)


def test_a_replica_that_is_started_for_the_first_founding_leaves(config):  # noqa: F811
    url = founded(config)
    open_run(load_config(mended(config)), found_again(config, url), CLOCK)
    joins = [sys.executable, "-m", "diloco.replica", url, "--slot", "r00"]
    done = subprocess.run(joins, capture_output=True, text=True, timeout=180)
    assert done.returncode not in (0, 1), done.stderr
    assert open_store(f"{url}/again").get(layout.claim_key("r00", 1)) is None  # it did not join the new one


def test_two_people_found_one_run(config):  # noqa: F811
    url = founded(config)
    first = found_again(mended(config), url)
    mine = load_config(config)
    (config.parent / "text.txt").write_text("somebody else's")
    assert found_again(config, url) == first  # both saw the first founding
    open_run(load_config(config), first, CLOCK)
    (config.parent / "text.txt").write_text("one two three, mended")
    with pytest.raises(WrongRun, match="text file"):
        open_run(mine, first, CLOCK)
    assert read_run(first).record.files["text"]


def test_dying_between_the_two_writes_leaves_a_run_that_can_be_founded(capsys, config):  # noqa: F811
    url = founded(config)
    found_again(mended(config), url)
    assert "there is no run at" in complaint(capsys, "status", url)
    open_run(load_config(config), record.current_url(url), CLOCK)
    assert say(capsys, "status", url)[0] == 0


def test_a_bucket_with_options_keeps_them() -> None:
    assert record.url_below("s3://b/x?region=r") == "s3://b/x/again?region=r"
    assert record.url_below("runs/mine/") == "runs/mine/again"


def test_plan_follows_as_well(capsys, config):  # noqa: F811
    url = founded(config)
    open_run(load_config(mended(config)), found_again(config, url), CLOCK)
    code, out, _ = say(capsys, "plan", config, "--run", url, "--json")
    assert code == 0 and f"{url}/again" in out


def test_a_run_without_an_event_has_taken_no_time(capsys, config):  # noqa: F811
    """Before: the seconds since 1970, if Ctrl-C came after run.json was written."""
    assert say(capsys, "status", founded(config))[1].splitlines()[0].split()[-2:] == ["0", "s"]


# -------------------------------------------------------------------- plan, and launch --dry-run, refuse as train does


def test_plan_refuses_the_run_that_train_would_refuse(capsys, config, run):  # noqa: F811
    """Before: it showed a price and ended with 0."""
    for wrong, told in (
        (("--set", "outer.lr=0.1"), "holds a run with other mathematics: outer.lr is"),
        (("--steps", "3"), "6 outer steps are committed already, and steps = 3 asks for fewer"),
    ):
        said = [complaint(capsys, verb, config, "--run", run.url, *wrong) for verb in ("plan", "train")]
        assert told in said[0] and said[0].removeprefix("diloco plan") == said[1].removeprefix("diloco train")
    assert "is inside the run at" in complaint(capsys, "plan", config, "--run", f"{run.url}/mine")
    for more, told in (
        ("6", "the run is finished, all 6 outer steps"),
        ("9", f"it continues with the run in {run.url}"),
    ):
        code, out, _ = say(capsys, "plan", config, "--run", run.url, "--steps", more)
        assert code == 0 and told in out


def test_plan_refuses_a_folder_that_cannot_be_written(capsys, config, monkeypatch):  # noqa: F811
    monkeypatch.setattr(plan.os, "access", lambda path, mode: False)
    assert f"cannot write into {config.parent}" in complaint(capsys, "plan", config, "--run", config.parent / "a" / "b")


def test_a_dry_run_refuses_the_run_that_launch_would_refuse(capsys, config, monkeypatch):  # noqa: F811
    monkeypatch.chdir(config.parent)
    dry = ("launch", "--dry-run", "--run", "mine", "train.py")
    script = Path("train.py")
    script.write_text("# DiLoCoCallback")
    found = read_script("train.py", [], is_module=False, more=(), fleet=FleetConfig())
    store = open_run(found.config, "mine", CLOCK).store
    script.write_text("# DiLoCoCallback, mended")
    assert say(capsys, *dry)[0] == 0, "nothing was trained there yet: `launch` founds the run again"
    store.create(layout.commit_key(0), b"a step")
    assert "script/train.py file (digest" in say(capsys, *dry)[2]
    script.write_text("# DiLoCoCallback")
    assert "it continues with the run in mine" in say(capsys, *dry)[1]
