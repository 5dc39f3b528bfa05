"""One replica in K processes: rank 0 is the replica, and the other ranks train as it does.

    python -m diloco.replica RUN_URL --slot r00 --devices 2

    rank 0   run_member ─▶ claim, beat ─▶ inputs ─▶ Job ──tell──▶ rank 1 …   build the loop, make_diloco, train
                                                    start   ────▶            at the same inner step
             after each inner step:  evaluation due? rows ──────▶            score their part
                                     done? (Led's word) ────────▶            stop
             a script of `diloco launch` ───────▶   each rank runs it, as under torchrun (script_ranks.py)

Only rank 0 uses the bucket.  At SIGTERM to rank 0 the replica leaves. If a rank dies, it ends (process/ranks.py).

Notes and events of the other ranks' rewards go to rank 0's session (FollowingHost).

Not promised: a log of the other ranks' rollouts; several hosts.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from diloco.process import exitcodes
from diloco.process.processes import DEVICE_ENV
from diloco.process.ranks import END_S, SETTLE_S, Followers, forget_launcher, tell_leader, told_twice
from diloco.process.session import Session, SessionHost
from diloco.replica import replica
from diloco.replica.rank_faults import rank_fault
from diloco.replica.script_ranks import follow_script, tell_script, told_script
from diloco.run.config import ConfigError, RunConfig
from diloco.run.record import ModelRecord, Run
from inner.errors import RewardFailed
from inner.settings.inner import Seeds
from rendezvous.errors import RendezvousError

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop
    from diloco.outer.managers.manager import StoreManager
    from diloco.outer.ranks.group import Group
    from diloco.outer.ranks.led import Led
    from diloco.replica.evaluation import Evaluator
    from inner import InnerLoop


NOTE, EVENT = "note", "event"  # messages of a FollowingHost


@dataclass(frozen=True)
class Job:
    """The inputs with which the other ranks build rank 0's loop.   before: outer steps taken before this run."""

    config: RunConfig
    inputs: replica.Inputs
    seeds: Seeds
    before: int


def run_ranks(url: str, slot: str, *, parent: str, devices: int) -> int:
    """Run rank 0 of a replica from its first line to its end. Return the exit code.   devices: 1 under a launcher."""
    if why := told_twice(devices):
        print(f"{slot}: {why}", file=sys.stderr, flush=True)
        return exitcodes.USER_ERROR
    forget_launcher()
    if devices == 1:
        return replica.run_member(url, slot, replica.train_or_run_script, parent=parent)
    if (name := os.environ.get(DEVICE_ENV, "cpu")) != "cpu":
        os.environ[DEVICE_ENV] = f"{devices} × {name}"  # the name in the run's log and in its GPU-hours
    followers = Followers(devices, follow)
    code = exitcodes.CRASHED
    try:
        act = partial(_lead_session, followers, devices)
        code = replica.run_member(url, slot, act, parent=parent, ranks=devices)
    finally:
        followers.end(END_S if code in (exitcodes.DONE, exitcodes.LEFT) else 0.0)
    return code


# -------------------------------------------------------------------- rank 0


def _lead_session(followers: Followers, devices: int, run: Run, session: Session) -> int:
    if fault := rank_fault(run.config, devices):
        raise ConfigError(fault)
    followers.on_loss = partial(_say_loss, session)
    followers.on_told = partial(_take_word, SessionHost(session))
    followers.is_over = partial(_has_no_round_left, session)
    session.where = _where_ranks_stand
    try:
        if run.config.script is not None:
            tell, end = partial(tell_script, run.config.script), partial(_end_scripts, followers, session)
            return replica.script_session(run, session, tell, end)
        leader = Leader()
        return replica.train_session(run, session, (leader.build, leader.manage, leader.judge))
    except RendezvousError:
        raise
    except Exception:
        followers.settle()
        raise


def _end_scripts(followers: Followers, session: Session, code: int) -> int:
    """Wait for the other ranks' scripts, which use rank 0's folder. Return CRASHED if one failed after the training."""
    failure = followers.end() if code in (exitcodes.DONE, exitcodes.LEFT) else ""
    if code != exitcodes.DONE or not failure:
        return code
    print(failure, file=sys.stderr, flush=True)
    _say_loss(session, failure)
    return exitcodes.CRASHED


def _has_no_round_left(session: Session) -> bool:
    """Whether rank 0 no longer needs the other ranks, even if it continues: for example, to save its model."""
    rv = session.rv
    return rv.is_leaving or rv.is_done or rv.members.status.phase == "left"


def _where_ranks_stand() -> str:
    """Return where each rank stands.   If the code of another rank hangs, rank 0 only waits."""
    from diloco.outer.ranks.group import show_ranks

    return show_ranks()


def _say_loss(session: Session, text: str) -> None:
    session.emit("crashed", error=text)
    session.flush()


def _take_word(host: SessionHost, index: int, kind: str, *told: Any) -> None:
    """Pass on a message of a FollowingHost.   A note tells the watchdog that rank 0 waits for this rank's user code."""
    if kind == NOTE:
        host.note(f"rank {index}: {told[0]}" if told[0] else "")
    else:
        event, text, fields = told
        host.emit(event, f"rank {index}: {text}", **fields)


class FollowingHost:
    """The inner.host.Host of a rank that rank 0 leads: notes and events go to rank 0's session."""

    owner = ("alone", "0", 0)  # a replica of several ranks rents nothing (rank_faults.py)

    def note(self, text: str) -> None:
        tell_leader(NOTE, text)

    def emit(self, event: str, text: str, **fields: Any) -> None:
        tell_leader(EVENT, event, text, fields)

    def rented(self, seconds: float, usd_per_hour: float | None) -> None: ...

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class Leader:
    """Builder of rank 0's loop, manager and evaluator. It tells the other ranks what to build."""

    def __init__(self) -> None:
        from diloco.outer.ranks.group import Group

        self.group: Group = Group()  # the other ranks have imported what they need

    def build(
        self, run: Run, session: Session, record: ModelRecord, inputs: replica.Inputs, seeds: Seeds
    ) -> "tuple[LeadingLoop, Path]":
        whole = replica.fetch_weights(run, session, record, inputs.model_dir)
        inputs = replica.Inputs(whole, inputs.files, inputs.scratch)
        self.group.tell(Job(run.config, inputs, seeds, run.record.parent.outer_steps))
        self.loop: Any
        self.loop, folder = replica.build_loop(run, session, record, inputs, seeds)
        return LeadingLoop(self.loop, self.group), folder

    def manage(self, config: RunConfig, session: Session, theta_0: Callable[[], Mapping[str, Any]] | None) -> "Led":
        from diloco.outer.ranks.led import Led

        self.loop.place()  # after the start model's bits were compared
        return Led(self.group, lambda: cast("StoreManager", replica.manager_of(config, session, theta_0)))

    def judge(
        self, run: Run, session: Session, loop: "LeadingLoop", inputs: replica.Inputs, outer: "OuterLoop"
    ) -> "LeadingEvaluator | None":
        evaluator = replica.evaluator_of(run, session, cast("InnerLoop", loop), inputs, outer, ranks=self.group.count)
        return None if evaluator is None else LeadingEvaluator(evaluator, self.group)


class LeadingLoop:
    """Rank 0's InnerLoop, which the other ranks' loops follow."""

    def __init__(self, loop: "InnerLoop", group: "Group") -> None:
        self._loop: Any = loop
        self.group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def start_at(self, inner_step: int) -> None:
        self._loop.start_at(self.group.tell(inner_step))

    def score(self, rows: Sequence[dict[str, Any]], *, greedy: bool, seed: int) -> dict[str, list[float]]:
        self.group.tell((rows, greedy, seed))
        return self._loop.score(rows, greedy=greedy, seed=seed)


class LeadingEvaluator:
    """Rank 0's Evaluator.  For each of its calls, the other ranks call `_follow_evaluation`."""

    def __init__(self, evaluator: "Evaluator", group: "Group") -> None:
        self._evaluator = evaluator
        self._group = group

    def is_due(self) -> bool:
        return bool(self._group.agree(self._evaluator.is_due())[0])

    def evaluate(self) -> None:
        self._evaluator.evaluate()
        self._group.tell(None)


# -------------------------------------------------------------------- the other ranks


def follow() -> int:
    """Run a rank that rank 0 leads. Return the exit code."""
    import torch

    from diloco.outer.ranks.group import Group, write_at_request

    write_at_request()
    if os.environ.get("OMP_NUM_THREADS") == "1":
        torch.set_num_threads(1)
    if (script := told_script()) is not None:
        return follow_script(script)
    group = Group()
    try:
        _follow_training(group, group.tell(None))
    except RewardFailed as error:
        print(error, file=sys.stderr, flush=True)
        time.sleep(2 * SETTLE_S)  # all ranks raise the error, and rank 0 reports it
        return exitcodes.NO_REWARD
    return exitcodes.DONE


def _follow_training(group: "Group", job: Job) -> None:
    from diloco import make_diloco
    from diloco.outer.ranks.led import Led
    from inner import build_inner

    config, inputs = job.config, job.inputs
    scratch = inputs.scratch / f"rank{group.index}"
    scratch.mkdir(exist_ok=True)
    warmup = replica.REJOIN_WARMUP
    loop: Any = build_inner(config.inner, inputs.model_dir, inputs.files, job.seeds, warmup, scratch=scratch)
    loop.place()
    if config.fleet.record_rollouts:
        from diloco.replica.rank_rollouts import FollowingPlaces
        from inner.rollouts.recording.recorded import can_record, record_rollouts

        if can_record(loop.trainer, in_shards=config.inner.lora is None):
            record_rollouts(loop.trainer, FollowingPlaces(group))
    loop.report_to(FollowingHost())
    manager = Led(group)
    manager.stats = loop.pop_metrics
    with make_diloco(loop.model, loop.optimizer, manager, config.outer, boundary=loop.boundary) as outer:
        progress = lambda: outer.progress(job.before, config.fleet.steps)  # noqa: E731
        loop.follow(lambda: job.before + outer.committed(), outer.theta, manager.num_participants, progress)
        loop.start_at(group.tell(None))

        def stop() -> bool:
            if config.eval is not None:
                _follow_evaluation(group, loop)
            return manager.done

        if not stop():
            loop.train(stop)


def _follow_evaluation(group: "Group", loop: Any) -> None:
    """Score this rank's part of the rows that rank 0 sends, if an evaluation is due."""
    if not group.agree(0)[0]:
        return
    while (asked := group.tell(None)) is not None:
        rows, greedy, seed = asked
        loop.score(rows, greedy=greedy, seed=seed)
