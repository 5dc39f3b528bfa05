"""Replicas elsewhere get the package that scores the run's task, at the version that makes its rows."""

from typing import Any

import pytest

from diloco.run.config import RunConfig
from executors.platforms.places import Place
from executors.preflight.needs import task_packages
from executors.preflight.place_faults import place_faults
from executors.preflight.quote import fitted_places

SUM, SPELLING = "reasoning-gym:chain_sum", "verifiers:spelling-tasks"
PLACES = [Place("modal"), Place("hf-jobs"), Place("sky"), Place("local"), Place("slurm")]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """reasoning-gym and verifiers from an index, and the taskset's package from a folder."""
    versions = {"reasoning-gym": "0.1.25", "verifiers": "0.4.0"}
    known = task_packages.metadata.version
    monkeypatch.setattr(task_packages.metadata, "version", lambda name: versions.get(name) or known(name))
    monkeypatch.setattr(task_packages, "_is_local", lambda name: name not in versions)
    monkeypatch.setattr(task_packages, "_distributions_of", lambda module: ["spelling"])
    monkeypatch.setattr(task_packages, "_taskset_module", lambda task: "spelling_tasks" if task == SPELLING else "")


def config(task: str = SUM, rewards: Any = None, **more: Any) -> RunConfig:
    inner = {"model": "me/model", "data": {"task": task}, **more}
    return RunConfig.from_dict({"inner": inner | ({"rewards": rewards} if rewards else {})})


def packages(settings: RunConfig, places: list[Place] = PLACES) -> list[Any]:
    return [place.options.get("pip") for place in fitted_places(places, settings)]


def test_places_elsewhere_get_it_and_others_do_not() -> None:
    assert packages(config()) == [["reasoning-gym==0.1.25"]] * 3 + [None] * 2
    assert packages(RunConfig()) == [None] * 5


def test_what_a_person_names_stays() -> None:
    named = [Place("modal", options={"pip": ["rich"]}), Place("sky", options={"pip": "reasoning_gym==0.1.24,rich"})]
    assert packages(config(), named) == [["rich", "reasoning-gym==0.1.25"], "reasoning_gym==0.1.24,rich"]
    again = fitted_places(fitted_places(PLACES, config()), config())
    assert [p.options.get("pip") for p in again] == packages(config()), "a second command adds nothing"


def test_a_reward_of_ones_own_needs_no_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunConfig, "check_files", lambda self: None)
    assert packages(config(rewards={"function": "rewards.py:score"})) == [None] * 5


def test_a_taskset_that_is_a_folder_here_is_refused_elsewhere() -> None:
    (fault,) = place_faults(config(SPELLING), "memory://x/run", [Place("modal")])
    assert fault.startswith("inner.data.task = 'verifiers:spelling-tasks': spelling_tasks is a folder of this machine")
    assert "--pip" in fault and packages(config(SPELLING))[0] == ["verifiers==0.4.0"]
    for options in ({"pip": ["spelling-tasks==1"]}, {"image": "docker.io/me/image:1"}, {"packages": "spelling_tasks"}):
        assert not list(place_faults(config(SPELLING), "memory://x/run", [Place("hf-jobs", options=options)]))
    assert not list(place_faults(config(SPELLING), "memory://x/run", [Place("local")]))


def test_a_reward_in_a_file_here_is_refused_elsewhere() -> None:
    asked = config()
    asked.inner.data.task_options["task"] = {"rewards": {"length": {"fn": "/home/me/graders.py:length"}}}
    (fault,) = place_faults(asked, "memory://x/run", [Place("hf-jobs")])
    assert fault.startswith("inner.data.task_options: /home/me/graders.py is a file of this machine")
    for place in (Place("local"), Place("modal", options={"image": "docker.io/me/image:1"})):
        assert not list(place_faults(asked, "memory://x/run", [place]))


def test_verifiers_and_the_versions_with_vllm_exclude_each_other() -> None:
    place = Place("modal", gpu=("H100",), options={"pip": ["spelling-tasks"]})
    (fault,) = place_faults(config(SPELLING, vllm={}), "memory://x/run", [place])
    assert "verifiers wants mcp 2.0.0" in fault and "mcp==" in fault
    assert not list(place_faults(config(vllm={}), "memory://x/run", [place]))
