"""One number that no view can reckon with blinds none: 1e308 in an offer, Infinity in a log.

The reader leaves it out; what else the same object says is shown.
"""

import json
import shutil
from pathlib import Path

import pytest

from diloco.process.journal import event_of, rollout_head, rollout_line
from diloco.runlog.opening import open_view
from diloco.runlog.scope import COSTS
from executors.cli.main import main
from executors.cli.watch.app import WatchApp
from executors.cli.watch.looks import RunLooks
from executors.cli.watch.panes import Panes
from rendezvous.clock import SystemClock
from tests.executors.test_watch_view import play, screen, whole
from tests.support.puppets import PuppetRun

ASKED = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "first": 1}
NUMBERS = ["Infinity", "-Infinity", "NaN", "1e999", "1e308", "-1e308", "12345678901234567890123", "true", '"1"', "[]"]


def line(number: str, *names: str, **fields: object) -> str:
    """A line of a log whose fields of these names have that number, as it is spelled."""
    return json.dumps({**fields, **dict.fromkeys(names, "@")}).replace('"@"', number) + "\n"


def rollout(number: str) -> str:
    return line(number, "reward", **ASKED)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> PuppetRun:
    run = PuppetRun(tmp_path_factory.mktemp("played"))
    run.rounds(3)
    return run


@pytest.fixture
def extreme(played: PuppetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Every replica's offers say 1e308, and its rollouts are of step Infinity."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "extreme"
    shutil.copytree(played.folder, folder)
    for path in folder.glob("steps/*/offer/*"):
        raw = json.loads(path.read_text())
        raw["stats"] = {"reward": 1e308, "loss": -1e308, "grad_norm": 1e308, "tokens": 1e308, "entropy": 0.25}
        path.write_text(json.dumps(raw, sort_keys=True, separators=(",", ":")))
    for n, number in enumerate(NUMBERS):
        log = folder / "log" / "r00-1"
        log.mkdir(parents=True, exist_ok=True)
        (log / f"{n:06d}.rollouts.jsonl").write_text(line(number, "step") + rollout("1"))
        (log / f"{n + 100:06d}.rollouts.jsonl").write_text(line("1", "step") + rollout(number) + rollout("0.5"))
        event = line(number, "loss", "took", at=1.0, event="step", step=1, entropy=0.25)
        (log / f"{n + 200:06d}.jsonl").write_text(event)
    return folder


@pytest.mark.parametrize("command", ["status", "report", "costs", "traces", "explain"])
def test_no_command_falls_over_it(extreme: Path, tmp_path: Path, capsys, command: str) -> None:
    more = {"traces": ["--to", str(tmp_path / "out.jsonl")], "explain": ["--step", "1"]}
    assert main([command, str(extreme), *more.get(command, [])]) == 0
    told = capsys.readouterr().err
    assert "Traceback" not in told and ("is not a finite number" in told) is (command == "traces")


def test_the_view_shows_what_it_can(extreme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = RunLooks(open_view(str(extreme), COSTS), SystemClock())

    async def script(app: WatchApp, pilot: object) -> None:
        text = "\n".join(screen(app))
        assert "outer step 3 of 100" in text and "r00-1" in text and "entropy" in text, text
        assert "cannot be drawn" not in text

    play(looks, (160, 50), script, whole(looks))


def test_a_pane_that_fails_leaves_the_others(played: PuppetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = RunLooks(open_view(played.url, COSTS), SystemClock())
    monkeypatch.setattr("executors.cli.watch.words.metric_line", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(Panes, "draw_curves", lambda self, picture, metric: 1 / 0)

    async def script(app: WatchApp, pilot: object) -> None:
        text = "\n".join(screen(app))
        assert "this pane cannot be drawn: " in text and "r00-1" in text and "outer step 3" in text, text

    play(looks, (160, 50), script, whole(looks))


@pytest.mark.parametrize("number", NUMBERS)
def test_what_cannot_be_reckoned_with_is_left_out(number: str) -> None:
    event = event_of(line(number, "share", at=1.0, event="x", text="t"))
    left_out = number in ("Infinity", "-Infinity", "NaN", "1e999", "1e308", "-1e308")
    assert event is None or ("share" in event) is not left_out
    with pytest.raises(ValueError):
        rollout_head(line(number, "step"))
    if number not in ("true", '"1"', "[]"):
        with pytest.raises(ValueError):
            rollout_line(rollout(number))
    assert rollout_line(rollout("0.5"))["reward"] == 0.5 and rollout_head('{"step": 7}') == (7, {})


@pytest.mark.parametrize("odd", [{}, [[1]], "x", 1e308, -1, 0, None, True, 2**62])
def test_a_config_of_odd_types_is_shown_all_the_same(
    played: PuppetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, odd: object
) -> None:
    """run.json as any writer to the bucket may have left it: the name, and the numbers that views reckon with."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(played.folder, folder := tmp_path / "odd")
    record = json.loads((path := folder / "run.json").read_text())
    names = ("sync_every", "fragments", "max_carry", "snapshot_every")
    record["config"] |= {"name": odd, "outer": dict.fromkeys(names, odd), "eval": odd, "fleet": odd}
    path.write_text(json.dumps(record))
    for argv in (["status"], ["report", "--to", str(tmp_path)], ["costs"]):
        assert main([argv[0], str(folder), *argv[1:]]) == 0
    assert "3 of 100 outer steps" in capsys.readouterr().out


@pytest.mark.parametrize("command", [["verify"], ["explain", "--step", "1"], ["gc", "--keep", "1MB", "--dry-run"]])
def test_a_config_that_nobody_wrote_is_said(played: PuppetRun, tmp_path: Path, capsys, command: list[str]) -> None:
    """Commands that compute with the config, and do not only show it, say that it is none."""
    shutil.copytree(played.folder, folder := tmp_path / "odd")
    record = json.loads((path := folder / "run.json").read_text())
    for odd in ({"data": 1.5}, {"data": {"task": "x"}}, {"rewards": [1]}, None):
        inner = odd and {**record["config"]["inner"], **odd}
        path.write_text(json.dumps({**record, "config": {**record["config"], "inner": inner}}))
        assert main([command[0], str(folder), *command[1:]]) == 2
        assert "run.json" in (said := capsys.readouterr().err) or "setting" in said or "inner" in said, said
