"""`--set NAME=VALUE` on plan and train: a setting in the place of the file's, refused like a key in the file."""

import json
import tomllib
from pathlib import Path

import pytest

from diloco.run.config import ConfigError, load_config
from diloco.run.founding import open_run
from diloco.run.record import read_run
from executors.cli.main import main
from rendezvous.clock import SystemClock
from rendezvous.errors import WrongRun

TEXT = "[inner]\nlr = 1e-3\nsdpo.weight = 0.1\n[fleet]\nreplicas = 2\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(TEXT)
    return path


def test_text_needs_no_quotes(file: Path) -> None:
    config = load_config(file, ["outer.codec=int8", "name=my run", "inner.sdpo.teacher=frozen"])
    assert (config.outer.codec, config.name, config.inner.sdpo.teacher) == ("int8", "my run", "frozen")


def test_a_setting_goes_before_the_files(file: Path) -> None:
    sets = ["inner.lr=2e-6", 'outer.codec = "int8"', "inner.sdpo.teacher='frozen'", "inner.trl.top_p=0.9", "seed=3"]
    config = load_config(file, [*sets, "inner.lora={r = 4}"])
    assert (config.inner.lr, config.outer.codec, config.seed, config.inner.trl) == (2e-6, "int8", 3, {"top_p": 0.9})
    assert (config.inner.sdpo.weight, config.inner.sdpo.teacher) == (0.1, "frozen"), "the rest of the table stays"
    assert config.inner.lora is not None and config.inner.lora.r == 4 and config.fleet.keep == "all"
    assert load_config(file, ["inner.lr=1e-4", "inner.lr=3e-4"]).inner.lr == 3e-4, "the last one counts"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("inner.lrr=1", r"--set inner\.lrr=1: unknown setting inner\.lrr; did you mean inner\.lr\?"),
        ("inner.temperature=0.5", r"has moved: write temperature in the table \[inner\.sampling\]"),
        ("lr=1", r"--set lr=1: unknown setting lr; did you mean (inner|outer)\.lr"),
        ("inner.lr", r"--set inner\.lr cannot be read .*NAME=VALUE"),
        ("inner.lr=", r"--set inner\.lr= cannot be read .*NAME=VALUE"),
        ("=3", r"--set =3 cannot be read .*NAME=VALUE"),
        ("inner.lora={r = 4", r"--set inner\.lora=\{r = 4 cannot be read .*as TOML has them"),
        ("inner.model='Qwen", r"--set inner\.model='Qwen cannot be read"),
        ("inner.lr=2e-", r"inner\.lr = '2e-' must be float or nothing, not str"),
        ("inner.lr=-1.0", r"run\.toml with --set inner\.lr=-1\.0: inner\.lr = -1\.0 must be greater than 0"),
        ("inner.lr=true", r"inner\.lr = True must be float or nothing, not bool"),
        ("outer=3", r"\[outer\] must be a table, found 3"),
        ("inner.trl.seed=3", "the run sets this itself. Use seed"),
    ],
)
def test_a_mistake_is_refused_as_in_the_file(file: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(file, [text])


def test_run_json_says_which_settings_they_were(file: Path, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    open_run(load_config(file, ["inner.lr=2e-6"]), url, SystemClock())
    raw = json.loads((tmp_path / "run" / "run.json").read_bytes())
    assert raw["config"]["overrides"] == {"inner.lr": 2e-6} and raw["config"]["inner"]["lr"] == 2e-6
    assert read_run(url).config.inner.lr == 2e-6
    with pytest.raises(WrongRun, match=r"inner\.lr is 2e-06 there, 0\.001 here"):
        open_run(load_config(file), url, SystemClock())
    file.write_text(TEXT.replace("1e-3", "2e-6"))
    open_run(load_config(file), url, SystemClock())  # the same run, however it is said


def test_a_file_may_not_have_overrides(file: Path) -> None:
    file.write_text(TEXT + "[overrides]\n")
    with pytest.raises(ConfigError, match="unknown setting overrides"):
        load_config(file)


def test_plan_takes_and_refuses_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(file), "--no-preflight", "--set", "fleet.replicas=4"]) == 0
    assert "4" in capsys.readouterr().out
    assert main(["plan", str(file), "--set", "inner.lrr=1"]) == 2
    assert "did you mean inner.lr?" in capsys.readouterr().err


def test_the_file_is_toml() -> None:
    assert tomllib.loads(TEXT)["inner"]["sdpo"] == {"weight": 0.1}
