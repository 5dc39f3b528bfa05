"""[inner.vllm] before anything is rented: the second set of versions, environments that are made of it, mistakes."""

# ruff: noqa: F811

import importlib.metadata
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from diloco.run.config import RunConfig
from diloco.runlog.reader import SUPERVISOR
from executors.platforms.base import ReplicaSpec
from executors.platforms.on_hf_jobs.job_spec import CONTAINER, MOUNT
from executors.platforms.on_modal.app import app_name
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.on_modal.image import fingerprint, pinned_requirements
from executors.platforms.packages.versions import (
    CHECK,
    VLLM_EXTRAS,
    VLLM_NEEDS,
    check_command,
    pinned_version,
    vllm_requirements,
)
from executors.platforms.packages.wheel import pack_code
from executors.platforms.places import Place
from executors.preflight.place_faults import notes_about, place_faults
from executors.preflight.quote import fitted_places
from tests.executors.test_hf_jobs import made
from tests.executors.test_hf_jobs import spec as hf_spec
from tests.executors.test_sky import Sky, sky  # noqa: F401
from tests.support.modal_fixtures import executor, platform, run, spec  # noqa: F401
from tests.support.pins import pins as pinned

ROOT = Path(__file__).parents[2]
MODAL = Place("modal", gpu=("H100",), secrets=("aws",))


def config(**vllm: Any) -> RunConfig:
    return RunConfig.from_dict({"inner": {"vllm": vllm}})


# ---------------------------------------------------------------------- the versions


def test_the_second_set_satisfies_the_project_and_its_extra() -> None:
    pins = {line.partition("==")[0]: line.partition("==")[2] for line in vllm_requirements()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(need for extra in VLLM_EXTRAS.split(",") for need in extras[extra])]
    needs = [Requirement(text) for text in (*asked, *extras["vllm"])]
    for need in needs:
        if need.name != project["name"]:
            assert need.specifier.contains(pins[need.name.replace("_", "-")]), need
    assert {need.name for need in needs} >= set(VLLM_NEEDS)
    assert pins["transformers"] == "5.17.0" and Version(pins["huggingface-hub"]) < Version("2")
    assert not [name for name in pins if name.startswith(("nvidia-", "triton"))], "torch's own wheel chooses those"


def test_both_sets_have_the_same_versions_of_what_decides_bits() -> None:
    """TRL, torch, PEFT and torchft: a run must mean the same on both."""
    first = pinned("3.13")
    for name in ("torch", "trl", "peft", "torchft", "accelerate", "safetensors", "obstore", "datasets"):
        assert pinned_version(name) == f"{name}=={first[name]}"


# ---------------------------------------------------------------------- environments


@pytest.mark.slow
def test_the_image_on_modal_is_made_of_them_and_ends_with_an_import(platform, run, tmp_path) -> None:
    platform.hold(True)
    executor = ModalExecutor(vllm=True)
    executor.launch_replicas([spec(run, tmp_path, "returns")])
    app = platform.server.deployed(app_name(run))
    functions = {f.definition.implementation_name: f.definition for i, f in platform.server.functions.items()
                 if i in app.functions.values()}  # fmt: skip

    def lines(name: str) -> list[str]:
        found, id = [], functions[name].image_id
        while id:
            image = platform.server.images[id]
            found = [*image.dockerfile_commands, *found]
            id = image.base_images[0].image_id if image.base_images else ""
        return found

    replica, supervise = lines("replica"), lines("supervise")
    install = next(c for c in replica if "uv pip install" in c).replace("'", "").split()
    assert set(vllm_requirements()) <= set(install) and "vllm==0.31.0" in install
    assert replica[-1].startswith("RUN ") and CHECK in replica[-1]
    assert not [c for c in supervise if "vllm" in c], "its clients are those of the first set"
    assert any(f"transformers=={importlib.metadata.version('transformers')}" in c for c in supervise)
    executor.shutdown(run)


def test_a_change_of_the_set_is_another_deployment() -> None:
    assert fingerprint(None, (), ()) != fingerprint(None, (), (), vllm=True)
    assert "vllm" not in " ".join(pinned_requirements())


def test_what_jobs_are_sent_has_its_constraints_and_vllm() -> None:
    sent = pack_code("/code", vllm=True)
    assert sent.files["constraints.txt"].decode().splitlines()[-1] == vllm_requirements()[-1]
    needs = sent.files["requirements.txt"].decode().splitlines()
    assert needs[0] == "-c constraints.txt" and f"[{VLLM_EXTRAS}] @ file:///code/{sent.digest}/" in needs[1]
    assert "serverless" not in VLLM_EXTRAS and tuple(needs[2:]) == VLLM_NEEDS
    usual = pack_code("/code")
    assert usual.digest != sent.digest and b"vllm" not in usual.files["requirements.txt"]


def test_a_job_on_the_hub_imports_it_before_the_replica_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = made(vllm=True)._recipe
    monkeypatch.setattr(recipe.hub, "upload", lambda bucket, shipment: f"me/{bucket}/{shipment.digest}")
    monkeypatch.setattr(type(recipe), "_secret_values", lambda self, spec: {})
    job = recipe.job(hf_spec(), "a10g-small")
    shell, dash, script, zero, *rest = job["command"]
    assert (shell, dash, zero) == ("sh", "-c", "sh") and rest[:2] == ["uv", "run"] and CONTAINER in rest
    assert script.endswith(' && exec "$@"') and check_command() in script
    digest = recipe._pack_once(True).digest
    assert f"{MOUNT}/{digest}/requirements.txt" in script and f"{MOUNT}/{digest}/requirements.txt" in rest
    watched = recipe.job(ReplicaSpec("s3://b/r", SUPERVISOR), "cpu-basic", "executors.supervision.hosted", "{}")
    assert watched["command"][:2] == ["uv", "run"] and digest not in " ".join(watched["command"])


def test_a_machine_of_skypilot_imports_it_last(sky: Sky, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from executors.platforms.on_sky import SkyExecutor

    monkeypatch.setenv("HOME", str(tmp_path))
    task = SkyExecutor(vllm=True, setup="apt-get install -y gcc").task(ReplicaSpec("s3://b/run", "r00"))
    assert task.setup.splitlines()[1:] == ["apt-get install -y gcc", check_command()]


# ---------------------------------------------------------------------- where it goes, and mistakes


def test_places_whose_environment_is_made_get_it_and_others_do_not() -> None:
    places = [MODAL, Place("hf-jobs", gpu=("a10g-small",)), Place("local"), Place("slurm")]
    assert [p.options.get("vllm") for p in fitted_places(places, config())] == [True, True, None, None]
    assert [p.options.get("vllm") for p in fitted_places(places, RunConfig())] == [None] * 4


def faults(place: Place, settings: RunConfig | None = None) -> list[str]:
    return list(place_faults(settings or config(), "memory://x/run", [place]))


def test_a_place_here_without_vllm_is_refused_with_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("local", "slurm"):
        monkeypatch.setattr("executors.preflight.needs.vllm_faults.has_vllm", lambda: False)
        place = Place(name, options={"cluster": "local"} if name == "slurm" else {})
        (fault,) = faults(place)
        assert fault.startswith("inner.vllm: vLLM is not installed here")
        assert "vllm==0.31.0, transformers==5.17.0, huggingface-hub==1.33.0" in fault
        assert "constraints-vllm.txt" in fault and "leave [inner.vllm] out" in fault
        monkeypatch.setattr("executors.preflight.needs.vllm_faults.has_vllm", lambda: True)
        assert faults(place) == [] == faults(place, RunConfig())


def test_a_place_elsewhere_is_right_with_a_gpu_and_refused_without() -> None:
    assert faults(MODAL) == []
    (fault,) = faults(Place("modal", secrets=("aws",)))
    assert fault.startswith("inner.vllm: replicas on modal would have no GPU") and "Add --gpu" in fault
    assert faults(Place("hf-jobs", options={"hardware": "a10g-small"})) == []
    assert "no GPU" in faults(Place("sky"))[0]


@pytest.mark.parametrize(
    ("named", "fits"), [("transformers==5.23.0", False), ("transformers", True), ("judge<2", True)]
)
def test_packages_that_exclude_it_are_refused_by_name(named: str, fits: bool) -> None:
    found = faults(Place("modal", gpu=("H100",), secrets=("aws",), options={"pip": [named], "vllm": True}))
    assert (found == []) == fits
    if found:
        assert f"--pip {named} on modal conflicts with vLLM, which is installed with transformers==5.17.0" in found[0]


def test_the_plan_names_the_versions_and_what_nobody_looks_at() -> None:
    (note,) = notes_about(config(), "memory://x", [MODAL])
    assert note.startswith("replicas on modal get the second set of versions (vllm==0.31.0, transformers==5.17.0)")
    (note,) = notes_about(config(), "memory://x", [Place("hf-jobs", options={"code": "mine==1"})])
    assert note == "not checked: that mine==1 brings vLLM; without it a job ends before its replica starts"
    lines = ModalExecutor(vllm=True).plan_notes([ReplicaSpec("s3://b/run", "r00")])
    assert "the image has vllm==0.31.0 and transformers==5.17.0" in lines
