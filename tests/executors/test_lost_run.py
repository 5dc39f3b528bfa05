"""A run whose records are gone is not done, and no replica works on for it."""

from pathlib import Path

import pytest

from diloco.process import exitcodes
from diloco.run.founding import refuse_lost_run
from diloco.run.record import read_run
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.errors import RecordsLost, StoreUnclear
from tests.support.world import World


def test_a_supervisor_ends_the_fleet_of_a_run_that_was_deleted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`aws s3 rm --recursive` below a run: the replicas went on, and the command ended with rc 0."""
    world = World(tmp_path).started()
    world.run.store.delete(world.run.store.list(""))
    world.pass_time(90)
    assert world.outcome is not None and world.outcome.code == exitcodes.USER_ERROR
    assert "run.json is gone, though this run has reached step" in world.outcome.text
    assert "run.json is gone" in capsys.readouterr().err
    assert not any(job.alive for job in world.cloud.jobs.values())


def test_a_control_record_lost_in_the_middle_ends_the_fleet_at_the_next_renewal(tmp_path: Path) -> None:
    """Before: the lease was renewed for days, while no replica could join any more."""
    world = World(tmp_path, steps=10_000).started()
    write_control(world.run.store, world.clock, min_replicas=1)
    world.pass_time(90)
    assert len(world.run.store.list(layout.CONTROLS)) > 3, "a lease was written"
    world.run.store.delete([layout.control_key(1)])
    world.pass_time(4 * 3600)
    assert world.outcome is not None and world.outcome.code == exitcodes.USER_ERROR
    assert "control/000001.json has vanished" in world.outcome.text
    assert not any(job.alive for job in world.cloud.jobs.values())


@pytest.mark.parametrize("key", [layout.RUN, layout.control_key(0)])
def test_nothing_is_called_done_whose_records_are_gone(tmp_path: Path, key: str) -> None:
    world = World(tmp_path)
    run = read_run(world.run.url)
    refuse_lost_run(run, records=1, head=0)
    world.run.store.delete([key])
    with pytest.raises(RecordsLost, match=f"{key} is gone"):
        refuse_lost_run(run, records=1, head=0)


def test_another_run_in_the_same_place_is_not_this_one(tmp_path: Path) -> None:
    world = World(tmp_path)
    (tmp_path / "other").mkdir()
    other = World(tmp_path / "other")
    body = other.run.store.get(layout.RUN)
    assert body is not None
    world.run.store.put(layout.RUN, body)
    with pytest.raises(RecordsLost, match=r"run.json is another run's"):
        refuse_lost_run(world.run, records=1, head=0)


def test_a_second_ctrl_c_waits_out_a_store_and_a_platform_that_are_both_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: the platform's error ended the supervisor, and the replicas went on."""
    world = World(tmp_path).started()

    def away() -> None:
        raise StoreUnclear("503")

    with monkeypatch.context() as trouble:
        trouble.setattr(world.supervisor, "tick", away)
        world.cloud.down = "503"
        world.supervisor.kill()
        assert world.supervisor._patient_tick() is None
    world.cloud.down = ""
    world.pass_time(60)
    assert world.outcome is not None and world.outcome.code == exitcodes.LEFT
    assert not any(job.alive for job in world.cloud.jobs.values())
