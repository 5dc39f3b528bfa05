"""`diloco bisect RUN -- COMMAND` and `diloco blame RUN`: from the request to an answer.

    bisect   the kept weights θ  ──▶ diloco/audit/bisect.py, with the command as the judge
    blame    the requested metric ──▶ diloco/audit/blame.py

The command follows `--`; `split_command` removes both before argparse could parse them.

Not promised: any protection from the command; you supply the command, and it runs with your rights.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.cli.answers import Answer
from executors.preflight.run_url import UsageError

if TYPE_CHECKING:
    from diloco.audit.bisect import Judge, Judgement
    from diloco.run.record import Run


@dataclass(frozen=True)
class JudgeRequest:
    """The range θ_first … θ_last, and the command that judges it.   merge: the command gets whole models, not adapters.

    by: whether to leave out each "replica" or "step".   text, prompts: files to judge by instead of a command.
    """

    first: int | None = None
    last: int | None = None
    command: Sequence[str] = ()
    merge: bool = False
    by: str = "replica"
    text: str | None = None
    prompts: str | None = None
    no_metric: bool = False


def bisect_answer(run: "Run", asked: JudgeRequest, say: Callable[[str], None]) -> Answer:
    """Find the step at which the command's result changes.   Raises UsageError, ConfigError."""
    if not asked.command:
        raise UsageError(
            "`diloco bisect RUN -- COMMAND` needs a command that says by its exit code whether a model is good (0) or "
            "bad (1 to 124; 125: cannot say). The model is in {model} or DILOCO_MODEL; its outer step is {step} or "
            "DILOCO_STEP"
        )
    from diloco.audit.bisect import bisect, most_judgements

    steps = _kept_steps(run, asked.first, asked.last)
    ends = f"from θ_{steps[0]} to θ_{steps[-1]}"
    say(f"judges the two ends of {len(steps)} θ, {ends}, then at most {most_judgements(steps)} more")
    change = bisect(steps, _told(_judge(run, asked), say))
    lines = change.lines(run.url)
    return Answer({"run": run.url, **change.to_dict(), "lines": lines}, lines, sentences=True)


def blame_answer(run: "Run", asked: JudgeRequest) -> Answer:
    """Find the replica or step whose pseudogradients changed a metric most.   Raises UsageError, ConfigError."""
    from diloco.audit.blame import blame, blame_dict, blame_lines, refuse_unseparated
    from diloco.audit.metrics import CommandNumber, open_metric
    from diloco.model.export import model_record

    _refuse_two_metrics(asked)
    first, last = asked.first or 0, _head(run) if asked.last is None else asked.last
    named = {"text": _file(asked.text), "prompts": _file(asked.prompts)}
    if asked.command:
        opened: Any = nullcontext(CommandNumber(_judge(run, asked)))
    else:
        opened = nullcontext() if asked.no_metric else open_metric(run, model_record(run), **named)
    with opened as metric:
        found = blame(run, first, last, metric, asked.by)
    refuse_unseparated(found)
    return Answer({"run": run.url, **blame_dict(found)}, blame_lines(found), sentences=True)


def _judge(run: "Run", asked: JudgeRequest) -> "Judge":
    from diloco.audit.bisect import Judge
    from diloco.model.export import model_record, refuse_merge

    refuse_merge(run, asked.merge)
    return Judge(run, model_record(run), asked.command, asked.merge)


def _told(judge: "Judge", say: Callable[[str], None]) -> "Callable[[int], Judgement]":
    def judged(step: int) -> "Judgement":
        began = time.monotonic()
        found = judge.judge(step)
        say(f"θ_{step}: {found} ({time.monotonic() - began:.1f} s)")
        return found

    return judged


def _kept_steps(run: "Run", first: int | None, last: int | None) -> list[int]:
    """Return the steps whose θ can be computed, between `first` and `last` (None: the run's ends)."""
    from diloco.model.export import refuse_gone, what_is_kept

    head = _head(run)
    for step in (first, last):
        if step is not None and step > head:
            raise UsageError(f"step {step} has not been taken yet: the run is at step {head}. Use at most {head}")
        if step is not None:
            refuse_gone(run, step)
    kept = what_is_kept(run)
    within = range(first or 0, (head if last is None else last) + 1)
    steps = [t for t in within if kept is None or kept.covers_step(t)]
    if len(steps) < 2:
        raise UsageError(
            f"there is nothing to search: this range has {len(steps)} θ. Use other values of --from and --to"
        )
    return steps


def _head(run: "Run") -> int:
    from diloco.runlog.reached import refuse_lost
    from rendezvous.keeping.reach import newest_head

    refuse_lost(run.store, head := newest_head(run.store))
    return head


def _file(name: str | None) -> Path | None:
    if name is None:
        return None
    if not Path(name).is_file():
        raise UsageError(f"there is no file {name}. Correct --text or --prompts")
    return Path(name)


def _refuse_two_metrics(asked: JudgeRequest) -> None:
    ways = {
        "--text": asked.text, "--prompts": asked.prompts, "--no-metric": asked.no_metric,
        "-- COMMAND": asked.command,
    }  # fmt: skip
    if len(given := [name for name, value in ways.items() if value]) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other. Use only one of them")
