"""`diloco bisect RUN -- COMMAND` and `diloco blame RUN`: from words typed to an answer.

    bisect   which θ are kept ──▶ diloco/audit/bisect.py, with the command as the judge
    blame    the metric that is asked for ──▶ diloco/audit/blame.py

The command stands behind `--`, which argparse would take for its own: `split_command` takes it off before.

Not promised: anything about the command; it is the user's, and runs with the user's rights.
"""

import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors.preflight.run_url import UsageError

if TYPE_CHECKING:
    from diloco.audit.bisect import Judgement
    from diloco.audit.judge import Judge
    from diloco.run.record import Run

Answer = tuple[dict[str, Any], list[str]]  # for programs, for people
WITH_COMMAND = ("bisect", "blame")


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """("bisect", "RUN", "--", "cmd", "-x") -> (["bisect", "RUN"], ["cmd", "-x"])"""
    if not argv or argv[0] not in WITH_COMMAND or "--" not in argv:
        return [*argv], []
    at = list(argv).index("--")
    return [*argv[:at]], [*argv[at + 1 :]]


def bisect_answer(run: "Run", args: Namespace, say: Callable[[str], None]) -> Answer:
    """Find the step at which the command's judgement changes.   Raises UsageError, ConfigError."""
    if not args.judge:
        raise UsageError(
            "`diloco bisect RUN -- COMMAND` needs a command that says by its exit code whether a model is good (0) or "
            "bad (1 to 124; 125: cannot say). The model lies in {model} or DILOCO_MODEL; its outer step is {step} or "
            "DILOCO_STEP"
        )
    from diloco.audit.bisect import bisect, most_judgements

    steps = _kept_steps(run, args.first, args.last)
    say(f"{len(steps)} θ, from θ_{steps[0]} to θ_{steps[-1]}: the two ends, then at most {most_judgements(steps)} more")
    change = bisect(steps, _told(_judge(run, args), say))
    return {"run": run.url, **change.to_dict(), "lines": change.lines(run.url)}, change.lines(run.url)


def blame_answer(run: "Run", args: Namespace) -> Answer:
    """Find whose pseudogradients moved a metric most.   Raises UsageError, ConfigError."""
    from diloco.audit.blame import blame, blame_dict, blame_lines, refuse_unseparated
    from diloco.audit.metrics import CommandNumber, open_metric
    from diloco.model.export import model_record

    _refuse_two_metrics(args)
    first, last = args.first or 0, _head(run) if args.last is None else args.last
    named = {"text": _file(args.text), "prompts": _file(args.prompts)}
    if args.judge:
        opened: Any = nullcontext(CommandNumber(_judge(run, args)))
    else:
        opened = nullcontext() if args.no_metric else open_metric(run, model_record(run), **named)
    with opened as metric:
        found = blame(run, first, last, metric, args.by)
    refuse_unseparated(found)
    return {"run": run.url, **blame_dict(found)}, blame_lines(found)


def gc_answer(run: "Run", args: Namespace, agreed: Callable[[list[str]], bool]) -> Answer:
    """Delete objects beyond a size, once agreed.   agreed: asks the person, after these lines.   Raises ConfigError."""
    from diloco.model.give_back import collect, plan_gc, plan_lines
    from diloco.runlog.evaluation import best_evaluation
    from diloco.runlog.reader import read_report
    from rendezvous.clock import SystemClock

    plan = plan_gc(run, args.keep, SystemClock())
    best = best_evaluation(read_report(run.store).evaluations)
    lines = plan_lines(run.url, plan, best.step if best else None)
    done = bool(plan.keys) and not args.dry_run and (args.yes or agreed(lines))
    if done:
        collect(run, plan, SystemClock())
    lines.append("done" if done else "nothing was deleted")
    facts = {"objects": len(plan.keys), "freed": plan.freed, "unnamed": plan.unnamed, "lost": plan.lost, "done": done}
    return {"run": run.url, **facts, "keys": [*plan.keys], "lines": lines}, lines


def _judge(run: "Run", args: Namespace) -> "Judge":
    from diloco.audit.judge import Judge
    from diloco.model.export import model_record, refuse_merge

    refuse_merge(run, args.merge)
    return Judge(run, model_record(run), args.judge, args.merge)


def _told(judge: "Judge", say: Callable[[str], None]) -> "Callable[[int], Judgement]":
    def judged(step: int) -> "Judgement":
        began = time.monotonic()
        found = judge.judge(step)
        say(f"θ_{step}: {found} ({time.monotonic() - began:.1f} s)")
        return found

    return judged


def _kept_steps(run: "Run", first: int | None, last: int | None) -> list[int]:
    """The steps whose θ can be computed, between two that are named, or of the whole run."""
    from diloco.model.export import refuse_gone, what_is_kept

    head = _head(run)
    for step in (first, last):
        if step is not None and step > head:
            raise UsageError(f"step {step} has not been taken yet: the run stands at {head}")
        if step is not None:
            refuse_gone(run, step)
    kept = what_is_kept(run)
    within = range(first or 0, (head if last is None else last) + 1)
    steps = [t for t in within if kept is None or kept.covers_step(t)]
    if len(steps) < 2:
        raise UsageError(
            f"there is nothing to search: {len(steps)} θ of this stretch are there. --from and --to name others"
        )
    return steps


def _head(run: "Run") -> int:
    from rendezvous.agreement.chain import first_open_step

    return first_open_step(run.store)


def _file(name: str | None) -> Path | None:
    if name is None:
        return None
    if not Path(name).is_file():
        raise UsageError(f"there is no file {name}")
    return Path(name)


def _refuse_two_metrics(args: Namespace) -> None:
    given = [
        *(["--text"] if args.text else []), *(["--prompts"] if args.prompts else []),
        *(["--no-metric"] if args.no_metric else []), *(["-- COMMAND"] if args.judge else []),
    ]  # fmt: skip
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} name two ways to judge. Leave one of them out")
