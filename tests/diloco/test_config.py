"""run.toml: what is accepted, and what each mistake is told."""

from pathlib import Path
from typing import Any

import pytest

from diloco.run.config import ConfigError, RunConfig, load_config
from diloco.run.founding import open_run, solo_warning
from diloco.run.record import read_run
from rendezvous import layout
from rendezvous.agreement.membership import Wanted, read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import WrongRun
from rendezvous.records.records import Control, WireError

ROOT = Path(__file__).parents[2]


def written(folder: Path, text: str) -> Path:
    (folder / "data.txt").write_text("one two three")
    path = folder / "run.toml"
    path.write_text(text)
    return path


SUPERVISED = '[inner]\nloop = "supervised"\nmodel = "tiny"\ndata.text = "data.txt"\n'

MISTAKES: dict[str, tuple[str, list[str]]] = {
    "unknown key": ("[outer]\nsync_evry = 5\n", ["outer.sync_evry", "did you mean outer.sync_every"]),
    "unknown key, far off": ("[outer]\nzzz = 5\n", ["unknown setting outer.zzz", "known:"]),
    "unknown section": ("[outr]\nlr = 0.5\n", ["unknown setting outr", "did you mean outer"]),
    "unknown inner key": ("[inner]\nalpha_sdp = 0.5\n", ["did you mean inner.sdpo.weight"]),
    "wrong type": ('[outer]\nsync_every = "six"\n', ["outer.sync_every", "must be int, not str"]),
    "a bool is no int": ("[outer]\nsync_every = true\n", ["must be int, not bool"]),
    "not divisible": ("[outer]\nsync_every = 10\nfragments = 3\n", ["not divisible", "sync_every = 9"]),
    "delay too long": ("[outer]\nsync_every = 4\nfragments = 2\nfragment_sync_delay = 2\n", ["fragments = 2"]),
    "inside a generation": (
        "[outer]\nsync_every = 6\n[inner]\ngrpo.steps_per_generation = 4\n", ["generation batch", "a multiple of 4"]
    ),
    "no quorum possible": ("[fleet]\nreplicas = 2\nmin_replicas = 3\n", ["min_replicas = 3", "from 1 to 2"]),
    "lr is not a number": ('[outer]\nlr = "fast"\n', ["outer.lr = 'fast'", '"auto"']),
    "lr": ("[outer]\nlr = -1\n", ["outer.lr = -1.0 must be greater than 0"]),
    "weighting": ('[outer]\nweighting = "tokens"\n', ["outer.weighting", "steps, uniform, samples"]),
    "a gate for honest ones": ("[outer]\nnorm_gate = 1\n", ["outer.norm_gate = 1.0", "at least 2, or 0"]),
    "no seconds": ("[outer]\nsync_seconds = 0\n", ["outer.sync_seconds = 0.0 must be greater than 0"]),
    "momentum": ("[outer]\nmomentum = 1.0\n", ["momentum"]),
    "missing file": ('[inner]\nloop = "supervised"\nmodel = "tiny"\ndata.text = "nowhere.txt"\n', ["nowhere.txt"]),
    "contradiction in inner": ("[inner]\nsampling.num_generations = 5\n", ["not a multiple of num_generations = 5"]),
    "a section that is none": ("outer = 3\n", ["[outer] must be a table"]),
    "no TOML": ("outer = [", ["cannot be read as TOML"]),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_a_clear_error(tmp_path: Path, mistake: str) -> None:
    text, words = MISTAKES[mistake]
    with pytest.raises(ConfigError) as said:
        load_config(written(tmp_path, text))
    assert str(tmp_path / "run.toml") in str(said.value)
    for word in words:
        assert word in str(said.value), str(said.value)


def test_a_model_s_folder_is_found_from_the_config_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: only from the current folder, while the prompts and the reward were found from the config's."""
    (tmp_path / "project").mkdir()
    (tmp_path / "model").mkdir()
    written(tmp_path / "project", SUPERVISED.replace('"tiny"', '"../model"'))
    monkeypatch.chdir(tmp_path)
    assert load_config("project/run.toml").inner.model == str((tmp_path / "model").resolve())
    monkeypatch.chdir(tmp_path / "project")
    assert load_config("run.toml").inner.model == "../model", "the run's mathematics have the name as it is written"


def test_a_missing_config() -> None:
    with pytest.raises(ConfigError, match=r"no file nowhere\.toml"):
        load_config("nowhere.toml")


@pytest.mark.parametrize("path", ["diloco/demo.toml", "examples/supervised/run.toml"])
def test_shipped_configs_are_good_and_survive_json(path: str) -> None:
    config = load_config(ROOT / path)
    assert RunConfig.from_dict(config.to_dict(), config.folder) == config


def founded(folder: Path, text: str = SUPERVISED, **wishes: Any) -> Any:
    return open_run(load_config(written(folder, text)), str(folder / "run"), SystemClock(), **wishes)


def test_the_same_command_resumes_and_desired_states_may_change(tmp_path: Path) -> None:
    first = founded(tmp_path)
    assert not first.resumed
    assert read_control(first.store).replicas == 3
    again = founded(tmp_path)
    assert again.resumed
    assert read_control(again.store).records == 1, "no news, no record"
    more = founded(tmp_path, replicas=5, steps=40)
    wanted = read_control(more.store)
    assert (wanted.replicas, wanted.steps, wanted.universe, wanted.records) == (5, 40, 5, 2)


def test_a_configured_quorum_is_never_lowered_by_the_way(tmp_path: Path) -> None:
    text = SUPERVISED + "[fleet]\nreplicas = 4\nmin_replicas = 3\n"
    assert read_control(founded(tmp_path, text, replicas=5).store).min_replicas == 3
    with pytest.raises(ConfigError, match=r"min_replicas = 3 with fleet\.replicas = 2"):
        founded(tmp_path, text, replicas=2)


def test_a_stopped_run_is_resumed_by_the_same_command(tmp_path: Path) -> None:
    run = founded(tmp_path)
    write_control(run.store, SystemClock(), stop=True)
    assert read_control(run.store).stop
    assert not read_control(founded(tmp_path).store).stop


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ("[outer]\nsync_every = 20\n", "outer.sync_every is 10 there, 20 here"),
        ("seed = 7\n", "seed is 0 there, 7 here"),
        (
            "[inner.schedule]\nlr_warmup = 2\nlr_replicas = 'linear'\n[outer]\nsync_every = 4\n",
            "lr_replicas is not set there, 'linear' here; inner.schedule.lr_warmup is 0 there, 2 here; outer.",
        ),
    ],
)
def test_other_mathematics_under_the_same_url_are_refused(tmp_path: Path, change: str, word: str) -> None:
    founded(tmp_path)
    text = change + SUPERVISED if change.startswith("seed") else SUPERVISED + change
    with pytest.raises(WrongRun, match="use another --run URL") as said:
        founded(tmp_path, text)
    assert word in str(said.value)


def test_another_file_under_the_same_name_is_other_mathematics(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, SUPERVISED))
    open_run(config, str(tmp_path / "run"), SystemClock())
    (tmp_path / "data.txt").write_text("something else")
    with pytest.raises(WrongRun, match="text file"):
        open_run(config, str(tmp_path / "run"), SystemClock())


def test_the_fleet_and_the_name_are_not_mathematics(tmp_path: Path) -> None:
    founded(tmp_path)
    assert founded(tmp_path, 'name = "other"\n' + SUPERVISED + "[fleet]\nreplicas = 4\n").resumed


def test_the_users_files_travel_with_the_run(tmp_path: Path) -> None:
    run = founded(tmp_path)
    (tmp_path / "data.txt").unlink()
    opened = read_run(run.url)
    key = opened.record.files["text"]["key"]
    assert opened.store.get(key) == b"one two three"
    assert opened.config.inner.data.text == key


def test_preference_pairs_travel_with_the_run(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, '[inner]\nreplay.weight = 0.3\nreplay.pairs = "data.txt"\n'))
    run = open_run(config, str(tmp_path / "run"), SystemClock())
    assert read_run(run.url).config.inner.replay.pairs == run.record.files["pairs"]["key"]
    (tmp_path / "data.txt").write_text("other pairs")
    with pytest.raises(WrongRun, match="pairs file"):
        open_run(config, str(tmp_path / "run"), SystemClock())


def test_no_run_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run at"):
        read_run(str(tmp_path / "nothing"))


def test_two_launchers_found_one_run(tmp_path: Path) -> None:
    """The second launcher reads the first one's run.json; control records never collide."""
    from concurrent.futures import ThreadPoolExecutor

    config = load_config(written(tmp_path, SUPERVISED))
    with ThreadPoolExecutor(8) as pool:
        runs = list(pool.map(lambda _: open_run(config, str(tmp_path / "run"), SystemClock()), range(8)))
    assert sum(not run.resumed for run in runs) == 1
    first = Control.decode(runs[0].store.get(layout.control_key(0)) or b"")
    assert first.replicas == 3


def test_how_the_outer_step_is_made_reaches_the_rules() -> None:
    outer = {"lr": "auto", "weighting": "samples", "norm_gate": 0, "sync_seconds": 30}
    config = RunConfig.from_dict({"outer": outer})
    assert (config.outer.rules.weighting, config.outer.rules.norm_gate, config.outer.rules.sync_seconds) == (
        "samples", 0.0, 30.0,
    )  # fmt: skip
    assert RunConfig.from_dict(config.to_dict()) == config and config.mathematics()["outer"]["lr"] == "auto"
    assert RunConfig().outer.rules.sync_seconds == 0.0, "no such limit by default"


def test_one_replica_alone_is_warned_of() -> None:
    assert solo_warning(Wanted(replicas=3, min_replicas=2)) == ""
    assert "3 are wanted, and any one is enough" in solo_warning(Wanted(replicas=3, min_replicas=1))
    assert "the only one" in solo_warning(Wanted(replicas=1, min_replicas=1))


@pytest.mark.parametrize(("table", "name"), [("outer", "max_carry"), ("fleet", "steps"), ("fleet", "log_rollouts")])
@pytest.mark.parametrize("value", [10**400, -(10**5000)], ids=["large", "negative"])
def test_an_integer_that_no_float_holds_is_refused_or_kept_and_never_a_traceback(
    table: str, name: str, value: int
) -> None:
    """`math.isfinite` raises for the first, and `repr` for the second."""
    try:
        RunConfig.from_dict({table: {name: value}, "inner": {}})
    except ConfigError as refused:
        assert f"{table}.{name}" in str(refused) and len(str(refused)) < 300
    else:
        assert (table, name, value > 0) == ("fleet", "steps", True)


def test_a_long_system_prompt_founds_a_run_and_one_that_no_reader_takes_founds_none(tmp_path: Path) -> None:
    """Before, run.json was written and never read again, so that its URL was lost."""
    text = '[inner.data]\nprompts = "data.txt"\nsystem = "{}"\n[inner.rewards]\nfunction = "data.txt:f"\n'
    run = founded(tmp_path, text.format("x" * 20_000))
    assert read_run(run.url).config.inner.data.system == "x" * 20_000
    (tmp_path / "other").mkdir()
    with pytest.raises(WireError, match=r"refuse this run.*its config is 100000 characters long"):
        founded(tmp_path / "other", text.format("x" * 100_000))
    assert not list((tmp_path / "other").rglob("run.json"))
