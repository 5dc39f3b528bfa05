"""Files that another user puts under our names are not followed, and do not hold us up."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from diloco.process import own_files
from executors.platforms.base import ReplicaSpec, State
from executors.platforms.on_host.executor import LocalProcessExecutor, make_process_folder, process_folder

BUCKET = "s3://bucket/run"


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def second_name(path: Path, victim: Path) -> None:
    os.link(victim, path)


def fifo(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


PLANTED = [link, second_name, fifo, folder]


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    file = tmp_path / "victim"
    file.write_text("mine\n")
    return file


@pytest.mark.parametrize("plant", PLANTED)
def test_nothing_is_written_through_what_somebody_planted(tmp_path, victim, plant) -> None:
    plant(tmp_path / "r00.1.log", victim)
    with pytest.raises(OSError), own_files.appended(tmp_path / "r00.1.log") as file:
        file.write(b"ours")
    assert victim.read_text() == "mine\n"


@pytest.mark.parametrize("plant", PLANTED)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_replica_s_output_goes_nowhere_else(tmp_path, victim, plant, method) -> None:
    """Before: another user made the victim's file grow by the replica's output."""
    spec = ReplicaSpec(f"file://{tmp_path}/run", "r00", entrypoint="tests.executors.test_local:exits", argv=("0",))
    plant(make_process_folder(spec.run) / "r00.1.log", victim)
    executor = LocalProcessExecutor([], method=method)
    (handle,) = executor.launch_replicas([spec])
    (status,) = executor.poll([handle])
    assert status.state is State.FAILED
    with_files = replace(handle, files="x")
    assert plant is second_name or executor.logs(with_files) != ["mine"]
    assert victim.read_text() == "mine\n"
    executor.close()


@pytest.mark.parametrize("plant", PLANTED)
def test_a_card_is_written_beside_whatever_was_planted(tmp_path, victim, plant) -> None:
    plant(Path(f"{tmp_path}/card.json.{os.getpid()}.part"), victim) if plant is not folder else None
    own_files.write_json(tmp_path / "card.json", {"pid": 7})
    assert own_files.read_json(tmp_path / "card.json") == {"pid": 7} and victim.read_text() == "mine\n"
    assert (tmp_path / "card.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("plant", [link, fifo, folder])
def test_nothing_is_read_through_it_either(tmp_path, victim, plant) -> None:
    victim.write_text('{"pid": 1}')
    plant(tmp_path / "r00.1.json", victim)
    assert own_files.read_json(tmp_path / "r00.1.json") is None
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert own_files.read_json(tmp_path / "deep.json") is None


def test_a_bucket_run_keeps_its_files_where_nobody_else_can_write(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    folder = make_process_folder(BUCKET)
    assert folder == process_folder(BUCKET) and folder.is_relative_to(tmp_path / "state" / "diloco" / "processes")
    assert {f.stat().st_mode & 0o777 for f in (folder, folder.parent, folder.parent.parent)} == {0o700}
    assert process_folder("s3://a/b_c") != process_folder("s3://a_b/c"), "two runs share no files"
    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert process_folder(BUCKET).is_relative_to(tmp_path / ".local" / "state" / "diloco")


def test_a_second_user_of_a_run_s_folder_has_process_files_of_its_own(tmp_path, monkeypatch) -> None:
    """Before: a second user's replicas failed three times each, "Permission denied: …/processes/r00.2.log".

    Seen with two accounts and a folder that both may write; here `access` answers as the kernel does.
    """
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "run").mkdir()
    run = f"file://{tmp_path}/run"
    assert process_folder(run) == make_process_folder(run) == tmp_path / "run/processes"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert make_process_folder(run).is_relative_to(tmp_path / "state")
    assert process_folder(f"file://{tmp_path}/other") == tmp_path / "other/processes"


@pytest.mark.parametrize("what", ["mode", "owner", "link of another"])
def test_a_folder_that_others_may_write_is_refused(tmp_path, monkeypatch, what) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ours = make_process_folder(BUCKET)
    if what == "mode":
        ours.chmod(0o777)
    elif what == "owner":
        os.chown(ours, 12345, -1)
    else:
        ours.rmdir()
        ours.symlink_to(tmp_path)
        os.lchown(ours, 12345, -1)
    with pytest.raises(OSError, match="belongs to another user, or others may write there"):
        make_process_folder(BUCKET)


def test_a_link_in_the_place_of_a_run_s_own_folder_is_refused(tmp_path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "processes").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="is a link"):
        make_process_folder(f"file://{tmp_path}")
