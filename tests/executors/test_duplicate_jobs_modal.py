"""Two calls of one launch on Modal: billed, ended, and none left after `stop`.

tests/executors/test_duplicate_jobs.py has the Hub's.   Here the real client and its real container runtime run against
tests/support/modal_server.py.
"""

import pytest

from diloco.process import exitcodes
from diloco.runlog.reader import Report, read_report
from executors.cli import main as cli
from executors.platforms.base import State, Unavailable
from executors.platforms.on_modal.app import Register, app_name
from executors.platforms.on_modal.calls import count_inputs
from executors.supervision.money.bills import costs
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.clock import SystemClock
from tests.support.entrypoints import marks
from tests.support.modal_fixtures import bucket, executor, founded, platform, run, spec, started, until

__all__ = ["bucket", "executor", "platform", "run"]  # fixtures


def calls(platform, run: str) -> list:
    """The calls of replicas of this run that have not ended."""
    found = [c for c in platform.server.calls.values() if run.encode() in c.input.args and c.result is None]
    return [c for c in found if c.function.definition.implementation_name == "replica"]


@pytest.mark.slow
def test_a_second_call_notes_itself_and_is_told_once(platform, executor, run, tmp_path) -> None:
    executor.launch_replicas([spec(run, tmp_path, "returns", "r09")])
    platform.hold(True)
    platform.lose_reply()
    (handle,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    lost, noted = calls(platform, run)[-2:]
    assert handle.native == noted.id and executor.orphans(run, [handle]) == []
    platform.hold(False)
    started(tmp_path)
    until(lambda: lost.result is not None, "the call too many still runs")
    executor._duplicates._looked.clear()  # its pause is over
    (duplicate,) = executor.orphans(run, [handle])
    assert (duplicate.slot, duplicate.attempt, duplicate.native) == ("r00", 1, lost.id) and duplicate.launched_at > 0
    executor._duplicates._looked.clear()
    assert executor.orphans(run, [handle]) == [] and len(marks(tmp_path, "start", "r00.1")) == 1
    (status,) = executor.poll([duplicate])
    assert (status.state, status.exit_code) == (State.FAILED, exitcodes.FENCED)


def no_answer(*_: object) -> None:
    raise ConnectionResetError("gone")


@pytest.mark.slow
def test_a_sweep_ends_calls_that_nobody_noted(platform, executor, run, tmp_path, monkeypatch) -> None:
    """The reply was lost, and so was the note of the second call; none of them has a machine yet."""
    executor.launch_replicas([spec(run, tmp_path, "returns", "r09")])
    until(lambda: not calls(platform, run), "r09 did not end")
    platform.hold(True)
    platform.lose_reply()
    with monkeypatch.context() as patched:
        patched.setattr(Register, "claim", no_answer)
        with pytest.raises(Unavailable):  # as far as the launcher knows, nothing was started
            executor.launch_replicas([spec(run, tmp_path, "waits")])
    register = Register.open(app_name(run))
    assert len(calls(platform, run)) == 2 and count_inputs(run, register) == 2
    other = platform.executor()
    assert other.find(run) == [h for h in other.find(run) if h.slot == "r09"], "no list names them"
    assert other.sweep(run) == [f"2 calls of {app_name(run)} that no launch names"]
    assert calls(platform, run) == [] and other.sweep(run) == []
    other.close()
    platform.hold(False)
    again = platform.executor()
    (handle,) = again.launch_replicas([spec(run, tmp_path, "returns", "r01")])  # the app is made again
    (result,) = again.collect([handle], timeout=120)
    again.close()
    assert result.ok, result


def test_a_sweep_of_a_run_that_modal_never_saw_finds_nothing(platform, executor) -> None:
    assert executor.sweep("s3://bucket/never") == []


@pytest.mark.slow
def test_costs_count_a_second_call_and_stop_proves_zero(
    platform, run, bucket, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("executors.platforms.on_modal.calls.LOOK_S", 0.5)
    monkeypatch.setattr("executors.supervision.slots.launches.LAG_S", 2.0)
    found = founded(run, bucket, tmp_path, fleet={"replicas": 1, "min_replicas": 1})
    found.store.put(layout.MODEL_MANIFEST, b"{}")  # nothing to publish
    platform.lose_reply()
    executor, seen = platform.executor(), list[str]()
    executor._default = executor._default.from_dict({**executor._default.to_dict(), "secrets": (bucket.secret,)})

    def look(supervisor: Supervisor, report: Report) -> None:
        if report.of_kind("found") and not seen:
            assert cli.main(["costs", run]) == 0
            seen.append(capsys.readouterr().out)
        if report.of_kind("ended"):
            raise KeyboardInterrupt  # the laptop is closed; its replica runs on

    polite = "tests.support.entrypoints:replica"
    with pytest.raises(KeyboardInterrupt):
        Supervisor(found, executor, SystemClock(), entrypoint=polite, each_tick=look).supervise()
    executor.close()
    bills = costs(read_report(found.store)).bills
    assert len(bills) == 2 and sum(b.ended is not None for b in bills) == 1, bills
    assert "r00        modal           2" in seen[0], seen
    assert len(calls(platform, run)) == 1
    monkeypatch.setattr("executors.supervision.lease.FRESH_S", 0.5)
    assert cli.main(["stop", run, "--grace", "0.5"]) == 0, capsys.readouterr()
    assert calls(platform, run) == [] and all(b.ended for b in costs(read_report(found.store)).bills)
