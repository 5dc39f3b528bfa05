"""A run whose episodes have boxes: what `diloco plan` refuses."""

from pathlib import Path

import pytest

from diloco.run.config import RunConfig
from executors.platforms.places import Place
from executors.preflight import box_faults
from executors.preflight.box_faults import check_boxes
from executors.preflight.quote import fitted_places
from inner.errors import InnerError
from tests.executors.test_preflight import plan
from tests.inner.test_boxes import write_task
from tests.support.planted_boxes import write_bwrap

RUN = '[inner]\nmodel = "toolworld"\n[inner.data]\ntask = "harbor:tasks"\n[inner.sampling]\nboxes = "{boxes}"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(RUN.format(boxes="local"))
    write_task(tmp_path / "tasks/one")
    return tmp_path


@pytest.fixture
def bwrap(tmp_path: Path) -> str:
    return f"{write_bwrap(tmp_path / 'bin')}:/usr/bin:/bin"


def test_a_run_toml_is_all_that_a_user_writes(folder: Path, bwrap: str) -> None:
    told = plan(folder, PATH=bwrap)
    assert told.code == 0 and "harbor:tasks" in told.err and "nothing was started" in told.out


def test_a_task_without_a_verifier_is_named(folder: Path, bwrap: str) -> None:
    (folder / "tasks/one/tests/test.sh").unlink()
    told = plan(folder, PATH=bwrap)
    assert told.code == 2 and "tasks/one has no verifier: tests/test.sh is missing" in told.err


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"local"', '"nowhere"', "inner.sampling.boxes = 'nowhere' is not known. Use one of: local, e2b"),
        ('boxes = "local"', "tool_workers = 2", "inner.data.task = 'harbor:tasks' runs in boxes. Set inner.sampling"),
        ('task = "harbor:tasks"', "", "inner.sampling.boxes = 'local' has no Harbor tasks"),
        ("harbor:tasks", "harbor:absent", "absent has no Harbor task"),
        ('"harbor:tasks"', '"harbor:tasks"\ntask_options = {color = 1}', "Harbor tasks have no option 'color'"),
    ],
)
def test_settings_that_cannot_work(folder: Path, bwrap: str, old: str, new: str, says: str) -> None:
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace(old, new))
    assert says in plan(folder, PATH=bwrap).err


def test_local_boxes_without_bubblewrap(folder: Path) -> None:
    told = plan(folder, PATH=str(folder))
    assert told.code == 2 and 'boxes = "local" needs `bwrap`, which is not on the PATH' in told.err


def test_a_provider_without_its_package_or_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    here, far = [Place("local")], [Place("hf-jobs")]
    monkeypatch.setattr(box_faults.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InnerError, match=r'"e2b": the package e2b is not installed here. `pip install e2b`'):
        check_boxes("e2b", here, {})
    with pytest.raises(InnerError, match="not in the image on hf-jobs"):
        check_boxes("e2b", far, {})
    monkeypatch.setattr(box_faults.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(InnerError, match="E2B_API_KEY is not set"):
        check_boxes("e2b", here, {})
    assert check_boxes("e2b", here, {"E2B_API_KEY": "k"}) == []
    with pytest.raises(InnerError, match="replicas on hf-jobs need E2B_API_KEY"):
        check_boxes("e2b", far, {"E2B_API_KEY": "k"})
    assert check_boxes("e2b", [Place("hf-jobs", secrets=("E2B_API_KEY",))], {}) == []
    assert check_boxes("e2b", [Place("modal", secrets=("mine",))], {}) == [
        "not checked: that the Modal secret mine holds E2B_API_KEY"
    ]


def test_replicas_elsewhere_get_the_providers_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from executors.preflight import task_packages

    monkeypatch.setattr(task_packages.metadata, "version", lambda name: "2.63.0")
    monkeypatch.setattr(task_packages, "_is_local", lambda name: False)
    config = RunConfig.from_dict({"inner": {"data": {"task": "harbor:tasks"}, "sampling": {"boxes": "e2b"}}})
    (place,) = fitted_places([Place("modal")], config)
    assert place.options["pip"] == ["e2b==2.63.0"]
