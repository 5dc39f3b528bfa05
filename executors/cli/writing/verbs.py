"""The verbs that write a run's results elsewhere, or compute them again from its bucket.

    export traces track          a model, states to ask teachers about, curves: written elsewhere
    verify explain blame bisect  compute numbers again, and explain them         eval: on held-out prompts
    gc reward                    the only verbs that change the bucket: objects are deleted; a late reward is added

Not promised: that manual changes in a folder of an earlier export are kept; that the weights θ of every step are kept
(`verify` lists the kept steps).
"""

import sys
from argparse import SUPPRESS, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.run.sections import FOLDER, SAMPLES, TRACKERS
from executors.cli.answers import Answer, fit_lines, say
from executors.cli.options import add_run_verb, again, flag, offer, value
from executors.cli.reaching import opened
from executors.preflight import run_url
from rendezvous.clock import SystemClock

if TYPE_CHECKING:
    from diloco.run.config import RunConfig
    from diloco.run.record import Run

STEP = "after T outer steps (default: the newest)"


def add_verbs(verbs: Any) -> None:
    export = add_run_verb(verbs, "export", "write a step's model as a from_pretrained folder", opened(_export))
    value(export, "--step", "T", STEP, type="natural")
    flag(export, "--best", help="the step with the highest reward on held-out prompts")
    value(export, "--to", "DIR", "a new folder, or one of an earlier export", required=True)
    value(export, "--push", "OWNER/NAME", "a repository of the Hub, with a model card, the report and rollouts")
    flag(export, "--public", help="with --push: a new repository is public")
    flag(export, "--dry-run", help="with --push: only write the folder")
    flag(export, "--merge", help="write a LoRA run's whole model, not only its adapter")
    verify = add_run_verb(verbs, "verify", "compute a run again from its bucket; report differences", opened(_verify))
    value(verify, "--step", "T", "only θ after T outer steps (default: all that is kept)", type="step_or_all")
    flag(verify, "--inner", help="compute the inner steps again, too, and compare the pseudogradients")
    text = "explain one outer step: its offers, its closing, its effect"
    explain = add_run_verb(verbs, "explain", text, opened(_explain))
    value(explain, "--step", "T", "the outer step after θ_T", type="natural", required=True)
    _add_judging_verbs(verbs)
    gc = add_run_verb(verbs, "gc", "delete old data that a run no longer needs, beyond a size", opened(_gc))
    value(gc, "--keep", "SIZE", '"5 GB"; "window": only data that a replica may need', required=True)
    flag(gc, "--dry-run", help="only list what would be deleted")
    flag(gc, "--yes", "-y", help="do not ask")
    text = "the reward of a step's model on held-out prompts, on this machine"
    evaluate = add_run_verb(verbs, "eval", text, opened(_eval))
    value(evaluate, "--step", "T", STEP, type="natural")
    value(evaluate, "--prompts", "FILE", "a file of prompts (default: that of the run's [eval])")
    value(evaluate, "--samples", "N", "completions per prompt at the run's temperature", type="natural")
    text = "write the rollouts of its log as states, to ask teachers about (docs/replay.md)"
    traces = add_run_verb(verbs, "traces", text, opened(_traces))
    value(traces, "--to", "FILE", "a new file", required=True, type="local_path")
    value(traces, "--pairs", "FILE", "preference pairs from late rewards, for [inner.replay]", type="local_path")
    value(traces, "--by", "NAME", "with --pairs: the judge whose late rewards count (default: the only one)")
    text = "add a reward to a recorded rollout, after its step; nothing is trained again (docs/replay.md)"
    reward = add_run_verb(verbs, "reward", text, opened(_reward))
    value(reward, "--rollout", "ID", "as state_id in the file of `diloco traces`", required=True)
    value(reward, "--value", "X", "the reward", required=True, type=float)
    value(reward, "--name", "NAME", "the judge's name: human, nightly_tests", required=True)
    _add_track(verbs)


def _add_judging_verbs(verbs: Any) -> None:
    text = "find the replica that changed a number most: θ is computed without each"
    blame = add_run_verb(verbs, "blame", text, opened(_blame))
    text = "find the outer step of a change: a binary search, judged by a command"
    bisect = add_run_verb(verbs, "bisect", text, opened(_bisect))
    for parser in (blame, bisect):
        parser.usage = f"{parser.prog} RUN [options] [-- COMMAND …]"
        value(parser, "--from", "A", "from θ_A on (default: the oldest)", dest="first", type="natural")
        value(parser, "--to", "B", "up to θ_B (default: the newest)", dest="last", type="natural")
        flag(parser, "--merge", help="COMMAND gets whole models of a LoRA run, not adapters")
    told = "leave out each replica, or each step (default: replica)"
    blame.add_argument("--by", choices=("replica", "step"), default="replica", help=told)
    value(blame, "--text", "FILE", "judge by the loss on this text")
    value(blame, "--prompts", "FILE", "judge by the reward on these prompts (default: the run's [eval])")
    flag(blame, "--no-metric", help="only norms and cosines; loads no model")


def _add_track(verbs: Any) -> None:
    track = add_run_verb(verbs, "track", "write a run's curves to a tracker; its bucket is only read", _track)
    offer(again(track, "--to", required=True, choices=TRACKERS, help="a tracker; may be repeated"), *TRACKERS)
    flag(track, "--follow", "-f", help="keep writing until the run is done")
    value(track, "--samples", "N", f"completions per outer step (default {SAMPLES})", type="natural", default=SAMPLES)
    value(track, "--project", "NAME", "project in wandb and trackio (default: WANDB_PROJECT, or diloco)")
    value(track, "--folder", "DIR", "folder for TensorBoard's files (default: tensorboard)", default=FOLDER)
    track.add_argument("--parent", default="", help=SUPPRESS)


def _export(args: Namespace, run: "Run") -> Answer:
    from executors.cli.writing.exported import fresh_folder, refuse_export, replace_export

    to = Path(args.to)
    if (args.public or args.dry_run) and not args.push:
        raise run_url.UsageError("--public and --dry-run belong to --push OWNER/NAME. Add it, or leave them out")
    refuse_export(to)
    from diloco.model.export import export

    beside: list[str] = []
    with fresh_folder(to) as made:
        step = export(run.url, best_step(run, args.step) if args.best else args.step, made, args.merge)
        if args.push:
            from executors.cli.writing.push import write_bundle

            beside = write_bundle(run, step, made)
        names = replace_export(to, made, run.url, step)
    what, reader = ("adapter", "PEFT's") if "adapter_config.json" in names else ("model", "transformers'")
    lines = [f"wrote the {what} after {step} outer steps to {to}; {reader} from_pretrained reads it"]
    if args.merge and (lora := run.config.inner.lora) is not None and lora.base is not None:
        lines.append(
            f"its base was dequantised from 4 bits to {run.config.inner.dtype}, as the adapter was trained on it"
        )
    data = {"run": run.url, "outer_step": step, "to": args.to}
    if args.push:
        from executors.cli.writing.push import push

        lines.append(f"beside it: {', '.join(beside)}")
        data["pushed"] = None if args.dry_run else push(to, names, args.push, public=args.public)
        lines.append(f"pushed: {data['pushed']}" if data["pushed"] else "nothing was pushed")
    return Answer(data, lines)


def best_step(run: "Run", step: int | None) -> int:
    """Return the kept step with the best evaluation on the held-out prompts.

    Raise ConfigError if no kept step was evaluated, or if `step` is given as well."""
    from diloco.model.export import keep_of, what_is_kept
    from diloco.run.config import ConfigError
    from diloco.runlog.evaluation import best_evaluation, prompts_words, score_words
    from diloco.runlog.reader import read_report

    if step is not None:
        raise ConfigError("--best and --step both name a step. Leave one of them out")
    kept = what_is_kept(run)
    evaluations = read_report(run.store).evaluations
    best = best_evaluation([e for e in evaluations if kept is None or kept.covers_step(e.step)])
    if best is None and evaluations:
        raise ConfigError(f"no evaluated step is kept (fleet.keep = {keep_of(run)}). Leave out --best for the newest")
    if best is None:
        raise ConfigError(
            "no step of this run was evaluated on held-out prompts. Use --step T, or set [eval] in the next run"
        )
    kind, score = best.headline
    say(f"best: step {best.step}, held out {kind} {score_words(score)} on {prompts_words(best)}")
    return best.step


def _verify(args: Namespace, run: "Run") -> Answer:
    from diloco.audit.verify import verify

    verdict = verify(run, args.step)
    if args.inner:
        from diloco.audit.inner import recompute_offers

        recompute_offers(run, say).add_to(verdict)
    return Answer({"run": run.url, **verdict.to_dict()}, verdict.lines(), 0 if verdict.good else 1, sentences=True)


def _explain(args: Namespace, run: "Run") -> Answer:
    from diloco.audit.explain import explain, explain_dict
    from diloco.audit.step_facts import read_step

    facts = read_step(run, args.step)
    return Answer({"run": run.url, **explain_dict(facts)}, explain(facts), sentences=True)


def _bisect(args: Namespace, run: "Run") -> Answer:
    from executors.cli.writing.judging import JudgeRequest, bisect_answer

    return bisect_answer(run, JudgeRequest(args.first, args.last, args.judge, merge=args.merge), say)


def _blame(args: Namespace, run: "Run") -> Answer:
    from executors.cli.writing.judging import JudgeRequest, blame_answer

    asked = JudgeRequest(
        args.first, args.last, args.judge, merge=args.merge, by=args.by, text=args.text, prompts=args.prompts,
        no_metric=args.no_metric,
    )  # fmt: skip
    return blame_answer(run, asked)


def _gc(args: Namespace, run: "Run") -> Answer:
    from diloco.model.give_back import collect, plan_gc, plan_lines
    from diloco.runlog.evaluation import best_evaluation
    from diloco.runlog.reader import read_report

    plan = plan_gc(run, args.keep, SystemClock())
    best = best_evaluation(read_report(run.store).evaluations)
    lines = plan_lines(run.url, plan, best.step if best else None)
    done = bool(plan.keys) and not args.dry_run and (args.yes or _is_deletion_agreed(lines))
    if done:
        collect(run, plan, SystemClock())
    lines.append("done" if done else "nothing was deleted")
    facts = {"objects": len(plan.keys), "freed": plan.freed, "unnamed": plan.unnamed, "lost": plan.lost, "done": done}
    return Answer({"run": run.url, **facts, "keys": [*plan.keys], "lines": lines}, lines, sentences=True)


def _is_deletion_agreed(lines: list[str]) -> bool:
    """Ask the user on a terminal; without a terminal raise UsageError, which names --yes."""
    from executors.preflight import quote

    if not sys.stdin.isatty():
        raise run_url.UsageError(
            "nothing was deleted: stdin is not a terminal, so you cannot be asked, and deleted objects do not come "
            "back. Add --yes, or look first with --dry-run"
        )
    say("\n".join(fit_lines(lines, sys.stderr)))
    return quote.yes("delete them?", agreed=False)


def _eval(args: Namespace, run: "Run") -> Answer:
    prompts = _held_out_file(args.prompts, run.config) if args.prompts else None
    from diloco.audit.offline_eval import evaluate_step
    from diloco.runlog.evaluation import evaluation_dict, evaluation_words

    found = evaluate_step(run, args.step, prompts=prompts, samples=args.samples, report_progress=say)
    return Answer({"run": run.url, **evaluation_dict(found)}, [f"held out {evaluation_words([found])}"])


def _held_out_file(spelling: str, config: "RunConfig") -> Path:
    """Return the named file, or a file with the rows of a dataset of the Hub."""
    from diloco.run.data_files import gather_rows
    from inner.settings.task import EVAL, is_one_file

    if not is_one_file(spelling):
        return gather_rows(EVAL, spelling, Path(), config.inner.data, say)[1]
    if not Path(spelling).is_file():
        from inner.data.refusals import folder_words

        is_folder = Path(spelling).is_dir()
        raise run_url.UsageError(f"--prompts: {folder_words(Path(spelling)) if is_folder else f'no file {spelling}'}")
    return Path(spelling)


def _traces(args: Namespace, run: "Run") -> Answer:
    from diloco.model.traces import freeze
    from executors.cli.warnings_said import warnings_said

    _refuse_targets(args)
    with warnings_said():
        made = freeze(run.store, Path(args.to), run.record.nonce)
    text = "wrote {states} states of {rollouts} rollouts to {to}; in {errors} of these states the action failed"
    data, lines = {"run": run.url, "to": args.to, **made}, [text.format(to=args.to, **made)]
    if args.pairs:
        from diloco.model.late_rewards import write_pairs

        data |= {"pairs": (pairs := write_pairs(args.to, args.pairs, args.by)), "pairs_to": args.pairs}
        lines.append(f"wrote {pairs} pairs to {args.pairs}: [inner.replay] pairs of the next run")
    return Answer(data, lines)


def _refuse_targets(args: Namespace) -> None:
    """Raise UsageError if `traces` would overwrite another file than its own."""
    if args.by and not args.pairs:
        raise run_url.UsageError("--by names the judge of --pairs. Add --pairs FILE, or leave it out")
    if args.pairs and Path(args.pairs).resolve() == Path(args.to).resolve():
        raise run_url.UsageError(f"--to and --pairs are both {args.to}. Name two files")
    for option, name, key in (("--to", args.to, b'"state_id"'), ("--pairs", args.pairs, b'"chosen"')):
        path = Path(name or "")
        if name and path.is_dir():
            raise run_url.UsageError(f"{option} {name} is a folder. Name a file in it")
        if name and path.is_file() and (start := path.open("rb").read(1 << 16)) and key not in start:
            raise run_url.UsageError(f"{option} {name} is another file, and would be overwritten. Name a new one")


def _reward(args: Namespace, run: "Run") -> Answer:
    from diloco.model.late_rewards import give_reward

    given = give_reward(run, SystemClock(), args.rollout, args.value, args.name)
    before = "no reward" if given.recorded is None else f"{given.recorded:g}"
    lines = [
        f"{given.name} gives {given.value:g} to {args.rollout}. Training used {before} for it, and keeps that value; "
        "`diloco traces` and `diloco report` show both"
    ]
    facts = {"name": given.name, "value": given.value, "trained_on": given.recorded, "at": given.at}
    return Answer({"run": run.url, "rollout": args.rollout, **facts}, lines, sentences=True)


def _track(args: Namespace) -> Answer:
    from executors.cli.writing.track import TrackRequest, track

    asked = TrackRequest(
        tuple(args.to), follow=args.follow, samples=args.samples, project=args.project, folder=Path(args.folder),
        parent=args.parent,
    )  # fmt: skip
    return track(asked, run_url.checked_url(args.run), SystemClock(), say)
