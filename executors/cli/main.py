"""The command `diloco`: one verb per intent, and a clear word when something is wrong.

    diloco VERB …  ──executors/cli/parser.py──▶  args  ──▶  _verb(args)  ──▶  exit code

A verb's own imports happen when it is used, so that `--help` and `status` answer at once.

Not promised: stable words for people; programs read --json.
"""

import json
import os
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diloco.process.output import print_plainly
from executors.cli.looking.back import split_command
from executors.cli.parser import make_parser
from executors.cli.wrapping import fit_lines
from executors.preflight import run_url

if TYPE_CHECKING:
    from diloco.model.fork import Fork
    from diloco.run.config import RunConfig
    from diloco.run.record import Run
    from executors.preflight.checks import Checked
    from executors.preflight.quote import Quote
    from executors.supervision.costs import Costs
    from rendezvous.agreement.membership import Wanted


def main(argv: list[str] | None = None) -> int:
    words, command = split_command(sys.argv[1:] if argv is None else argv)
    args = make_parser().parse_args(words)
    args.judge = command
    print_plainly()
    try:
        if (code := _short_form(args)) is not None:
            return code
        _resolve_run(args)
        return _act(args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `diloco status RUN | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("DILOCO_DEBUG") or not _is_expected(error):
            raise
        text, code = _explain_error(error)
        print(f"diloco {args.command}: {text}", file=sys.stderr)
        return code


LOOKS = ("status", "costs", "report", "diff")  # short, and nothing is written before all was read


BUSY = (
    "The bucket is busy or cannot be reached from here. The command is right, and a run that goes on waits for its "
    "bucket as well: say the same command again later"
)


def _act(args: Namespace) -> int:
    from executors.cli.opening import ask_again

    verb = VERBS[args.command]
    return ask_again(lambda: verb(args)) if args.command in LOOKS else verb(args)


def _explain_error(error: Exception) -> tuple[str, int]:
    """Return (text, exit code).  No answer of a platform, or a full disk, is no mistake in the command: the same one
    may work later."""
    from diloco.process import exitcodes
    from diloco.process.disk_space import full_disk_words, is_full
    from diloco.views.trackers.tracker import TrackerBusy
    from executors.platforms.base import Unavailable
    from rendezvous.errors import GaveUp, StoreUnclear

    if isinstance(error, StoreUnclear | GaveUp):  # the latter says what to do
        return f"{error}. {BUSY}" if isinstance(error, StoreUnclear) else str(error), exitcodes.GAVE_UP
    if isinstance(error, OSError) and is_full(error):
        return f"{full_disk_words(error, 'its files')}; free some, then the same command", exitcodes.GAVE_UP
    return str(error), exitcodes.GAVE_UP if isinstance(error, Unavailable | TrackerBusy) else exitcodes.USER_ERROR


def _short_form(args: Namespace) -> int | None:
    """Answer for a run of `launch_replicas`, which has no records; -> the exit code, None for any other run."""
    url = getattr(args, "run", None) or ""
    if not url or args.command in ("train", "plan", "setup", "demo", "completion"):
        return None
    from executors.cli.looking import short_runs
    from executors.cli.opening import ask_again
    from rendezvous.clock import SystemClock

    if (run := ask_again(lambda: short_runs.short_run(url, SystemClock()))) is None:
        return None
    if args.command not in short_runs.VERBS:
        raise run_url.UsageError(
            f"{url} was started by launch_replicas, which keeps no records: {', '.join(short_runs.VERBS)} know it; its "
            "logs are executor.logs(handle), with the handles of executor.find(run)"
        )
    with closing(run.executor):
        found = run.stop(args.grace) if args.command == "stop" else run.look()
        purged = run.executor.purge(url) if args.command == "stop" and args.purge else []
    rows = [{**s.to_dict(), "usd": run.usd(s)} for s in found]
    _print_answer(args, {"run": url, "replicas": rows, "purged": purged}, *run.lines(found), *purged)
    return 1 if args.command == "stop" and not all(s.state.ended for s in found) else 0


def _resolve_run(args: Namespace) -> None:
    """Set args.run to the present URL of a run that was founded again; people call it by its first one.

    Views find that out with their first requests (diloco/runlog/opening.py)."""
    elsewhere = ("demo", "plan", "setup", "completion", "status", "watch", "costs", "report", "track")
    if getattr(args, "run", None) is None or args.command in elsewhere:
        return
    from diloco.run.superseded import current_url
    from executors.cli.opening import ask_again

    url = run_url.checked_url(args.run)
    args.run = ask_again(lambda: current_url(url))


def _is_expected(error: Exception) -> bool:
    """Whether the error says what to do next; any other is a defect, and keeps its traceback."""
    from diloco.run.config import ConfigError
    from diloco.views.page.charts import ReportError
    from executors.platforms.base import ExecutorError
    from inner import InnerError
    from rendezvous.errors import RendezvousError

    known = ConfigError | InnerError | RendezvousError | OSError | run_url.UsageError | ReportError | ExecutorError
    return isinstance(error, known)


def _print_answer(args: Namespace, data: dict[str, Any], *lines: str) -> None:
    """Print the answer, for programs or for people."""
    if args.json or lines:
        print(json.dumps(data, indent=1) if args.json else "\n".join(lines), flush=True)


def _print_sentences(args: Namespace, data: dict[str, Any], lines: list[str]) -> None:
    """Print the same, at the terminal's width."""
    _print_answer(args, data, *fit_lines(lines, sys.stdout))


# -------------------------------------------------------------------- starting


def _read_config(args: Namespace) -> "RunConfig":
    """Read the config, with its data here: data on the Hub is fetched, several files are made one."""
    from diloco.run.config import load_config
    from diloco.run.data_files import gather_data

    return gather_data(load_config(args.config, args.set), _say)


def _train(args: Namespace) -> int:
    from diloco.run.founding import open_run
    from executors.cli.changing.scale import finished_words
    from executors.cli.starting.foreground import say
    from executors.preflight import quote
    from rendezvous.agreement.membership import read_control
    from rendezvous.clock import SystemClock
    from rendezvous.stores.open import open_store

    if args.momentum and not args.origin:
        raise run_url.UsageError("--momentum is that of the run that --from names; add --from OLD[@STEP]")
    config = _read_config(args)
    url = run_url.shareable_url(args.run)
    for note in _preflight_checked(args, config, url, read_control(open_store(url))).notes:
        say(note)
    fork = _read_fork(args, config) if args.origin else None
    offer = _make_quote(args, url, config.fleet.replicas, config=config)
    over = finished_words(open_store(url), args.run, args.steps or config.fleet.steps)
    if not over and not _is_agreed(args, offer):
        return 130
    if args.again:
        from executors.cli.starting.again import found_again

        url = args.run = found_again(config, url, SystemClock(), say)
    run_url.make_folder(url)
    wishes = {"replicas": _replicas_from(args), "steps": args.steps, "min_replicas": args.min_replicas}
    run = open_run(config, url, SystemClock(), parent=fork.parent if fork else None, **wishes)
    if fork is not None:
        _begin_fork(run, fork, args)
    if over:
        say(over)
    else:
        quote.write_quote(run.store, SystemClock(), offer)
    if run.record.why_codec:
        say(f"codec {run.record.codec}: {run.record.why_codec}")
    return _supervise_here(run, args, read_control(run.store))


def _read_fork(args: Namespace, config: "RunConfig") -> "Fork":
    from diloco.model.fork import read_fork

    return read_fork(run_url.checked_url(args.origin), config, args.momentum)


def _begin_fork(run: "Run", fork: "Fork", args: Namespace) -> None:
    from diloco.model.fork import begin
    from rendezvous.clock import SystemClock

    begin(run, fork, SystemClock())
    _say(f"goes on from {fork.parent}, {'with' if args.momentum else 'without'} its outer momentum")


def _resume(args: Namespace) -> int:
    from diloco.run.record import read_run
    from executors.cli.changing.scale import finished_words
    from executors.preflight import quote
    from rendezvous.agreement.membership import read_control, refuse_lost
    from rendezvous.clock import SystemClock

    url = run_url.shareable_url(args.run)
    run = read_run(url)
    wanted = read_control(run.store)
    refuse_lost(run.store, wanted)
    if over := finished_words(run.store, args.run, args.steps):
        _say(over)
        return _supervise_here(run, args, wanted)  # ends that no supervisor saw are still written down
    offer = _make_quote(args, url, wanted.replicas, config=run.config)
    if not _is_agreed(args, offer):
        return 130
    wishes = {"replicas": _replicas_from(args), "steps": args.steps, "min_replicas": args.min_replicas}
    quote.write_desired(run, SystemClock(), **{k: v for k, v in wishes.items() if v})
    quote.write_quote(run.store, SystemClock(), offer)
    return _supervise_here(run, args, read_control(run.store))


def _plan(args: Namespace) -> int:
    from diloco.process import exitcodes
    from executors.preflight import outlook, quote
    from executors.supervision.costs import Costs

    config = _read_config(args)
    url = run_url.shareable_url(args.run) if args.run else ""
    if url:
        run_url.refuse_foreign_files(url)
    bucket = outlook.look_into_bucket(url)
    url = bucket.url
    checked = _preflight_checked(args, config, url, bucket.wanted)
    named = outlook.stand_in_url(url, quote.wanted_places(args, bucket.wanted.places), quote.FAR)
    offer = _make_quote(
        args, named, config.fleet.replicas, bucket.wanted, None if url and not bucket.note else Costs(), config
    )
    replicas = _replicas_from(args) or config.fleet.replicas
    sizes = outlook.size_lines(config, checked.model, replicas, args.steps or config.fleet.steps)
    rate = outlook.rate_line(config, replicas)
    notes = [note for note in (*checked.notes, bucket.note) if note]
    data = {"run": url, **offer.to_dict(), "learning_rate": rate, "sizes": sizes, "notes": notes}
    lines = [*offer.lines(), rate, *sizes, *notes]
    _print_answer(args, data, *lines, "nothing was started")
    if not (unreached := [what for what in (bucket.unreached, checked.unreached) if what]):
        return 0
    _say(f"diloco plan: it could not be started now: {' and '.join(unreached)} cannot be reached from here")
    return exitcodes.GAVE_UP


def _preflight_checked(args: Namespace, config: "RunConfig", url: str, wanted: "Wanted") -> "Checked":
    """Check config, places and options before anything is created.  Raises UsageError."""
    from executors.preflight import quote
    from executors.preflight.checks import Checked, preflight

    places = quote.wanted_places(args, wanted.places)
    quote.check_reach(url or "s3://", places)
    return Checked() if args.no_preflight else preflight(config, args.config, url, places)


def _make_quote(
    args: Namespace,
    url: str,
    replicas: int,
    wanted: "Wanted | None" = None,
    spent: "Costs | None" = None,
    config: "RunConfig | None" = None,
) -> "Quote":
    """The plan and the price of a start.   replicas: without --replicas.   wanted, spent: None: read from the run."""
    from executors.preflight import quote
    from executors.preflight.alert_url import take_alert
    from rendezvous.agreement.membership import read_control
    from rendezvous.stores.open import open_store

    wanted = read_control(open_store(url)) if wanted is None else wanted
    places = quote.wanted_places(args, wanted.places)
    places = places if config is None else quote.fitted_places(places, config)
    quote.check_reach(url, places)
    if "alert" in args:
        take_alert(args.alert, places, detach=args.detach, environ=os.environ)
    slots = quote.slots_of(_replicas_from(args) or replicas)
    return quote.make_offer(
        url, places, slots, quote.budget_from(args, wanted), _spent_so_far(url) if spent is None else spent
    )


def _replicas_from(args: Namespace) -> int | None:
    from executors.platforms.multi import Place
    from executors.preflight import quote

    named = quote.replicas_in([Place.from_dict(p) for p in args.places or ()])
    if named and args.replicas and args.replicas < named:
        raise run_url.UsageError(f"--place names {named} replicas, --replicas {args.replicas}; leave one of them away")
    return args.replicas or named


def _spent_so_far(url: str) -> "Costs":
    from diloco.run.record import read_run
    from diloco.runlog.reader import read_report
    from diloco.runlog.scope import COSTS
    from executors.supervision.costs import Costs, costs
    from rendezvous import layout
    from rendezvous.stores.cache import cache_of
    from rendezvous.stores.open import open_store

    if open_store(url).get(layout.RUN) is None:
        return Costs()
    run = read_run(url)
    return costs(read_report(run.store, COSTS, cache_of(run.store, run.record.nonce)), time.time())


def _is_agreed(args: Namespace, offer: "Quote") -> bool:
    from executors.cli.starting.foreground import say
    from executors.preflight import quote

    if not offer.free:
        say("\n".join(f"  {line}" for line in offer.lines()))
    return quote.ask_agreement(offer, args.yes)


def _supervise_here(run: "Run", args: Namespace, wanted: Any) -> int:
    from diloco.process.output import survive_lost_output
    from diloco.run.founding import solo_warning
    from executors.cli.looking.status import view_for
    from executors.cli.starting import foreground

    if text := solo_warning(wanted):
        foreground.say(f"warning: {text}")
    if args.detach:
        return _supervise_detached(run, args)
    survive_lost_output()  # the fleet does not end because `| head` does, or a log's disk is full
    outcome = foreground.supervise_here(run, view=view_for(sys.stderr if args.json else sys.stdout))
    if args.json:
        _print_answer(args, {"run": run.url, "code": outcome.code, "text": outcome.text})
    else:
        foreground.say(outcome.text)
    if outcome.code in (4, 75):
        foreground.say(f"to go on: diloco resume {shlex.quote(args.run)}")
    if outcome.code == 0:
        foreground.say(
            f"next: diloco report {shlex.quote(args.run)}, or diloco export {shlex.quote(args.run)} --to DIR"
        )
    return outcome.code


def _supervise_detached(run: "Run", args: Namespace) -> int:
    from executors.cli.starting.detached import hand_over
    from executors.cli.starting.foreground import say
    from rendezvous.clock import SystemClock

    found = hand_over(run, SystemClock(), say)
    begun = found.started
    data = {"run": run.url, "started": begun is not None and found.code == 0, "code": found.code, "text": found.text}
    if begun is not None:
        data |= {"pid": begun.pid, "native": begun.native, "log": begun.log}
    _print_answer(
        args, data, found.text, f"  diloco status {shlex.quote(args.run)}", f"  diloco stop {shlex.quote(args.run)}"
    )
    return found.code


# -------------------------------------------------------------------- looking


def _status(args: Namespace) -> int:
    from diloco.runlog.opening import open_view
    from diloco.runlog.reader import Reader
    from diloco.runlog.scope import STATUS
    from executors.cli.looking import status
    from executors.supervision.costs import costs
    from executors.supervision.health import describe_supervision
    from rendezvous.clock import SystemClock

    view = open_view(run_url.checked_url(args.run), STATUS)
    reader = Reader(view.run.store, STATUS, view.cache, view.answers)
    report = reader.refresh()
    now = time.time()
    columns = shutil.get_terminal_size().columns
    last, supervisor = describe_supervision(reader.ahead, SystemClock(), report)
    spent = costs(report, now)
    table = status.status_table(report, now, columns)
    money = [f"  {status.cost_line(spent, report.wanted)}"] if spent.usd or spent.unknown else []
    data = {**status.status_dict(report, now), **status.cost_status(spent, report.wanted), **supervisor}
    _print_answer(args, data, *table, *money, f"  {last}")
    return 0


def _watch(args: Namespace) -> int:
    from rendezvous.clock import SystemClock

    if args.web or args.publish:
        from executors.cli.web.run import watch_page

        return watch_page(args, run_url.checked_url(args.run), SystemClock())
    from executors.cli.watch.run import watch

    return watch(run_url.checked_url(args.run), SystemClock(), as_json=args.json, out=sys.stdout)


def _logs(args: Namespace) -> int:
    from executors.cli.looking import logs
    from executors.cli.opening import reach_run
    from rendezvous.agreement.membership import read_control

    run = reach_run(args.run)
    with logs.log_of(run.url, read_control(run.store), args.slot) as log:
        if not args.follow:
            lines = log.lines(args.tail)
            _print_answer(args, {"slot": args.slot, "handle": log.handle, "lines": lines}, *lines)
            return 0
        for line in log.follow(args.tail):
            print(json.dumps({"slot": args.slot, "line": line}) if args.json else line, flush=True)
    return 0


def _costs(args: Namespace) -> int:
    from diloco.runlog.opening import open_view
    from diloco.runlog.reader import Reader
    from diloco.runlog.scope import COSTS
    from executors.cli.looking import status
    from executors.supervision.costs import costs

    view = open_view(run_url.checked_url(args.run), COSTS)
    report = Reader(view.run.store, COSTS, view.cache, view.answers).refresh()
    spent = costs(report, time.time())
    data = {"name": report.name, "url": view.run.url, **spent.to_dict(), **status.cost_status(spent, report.wanted)}
    _print_answer(args, data, *status.cost_table(spent, report))
    return 0


# -------------------------------------------------------------------- changing


def _scale(args: Namespace) -> int:
    from executors.cli.changing import scale
    from executors.cli.opening import reach_run
    from rendezvous.clock import SystemClock

    run = reach_run(args.run)
    offer = scale.growth_quote(run, args.replicas, args.min_replicas, _spent_so_far(run.url))
    if offer is not None and not _is_agreed(args, offer):
        return 130
    lines = scale.scale(run, SystemClock(), args.replicas, args.min_replicas)
    _print_answer(args, {"run": run.url, "replicas": args.replicas, "messages": lines}, *lines)
    return 0


def _drain(args: Namespace) -> int:
    from executors.cli.changing import scale
    from executors.cli.opening import reach_run
    from rendezvous.clock import SystemClock

    run = reach_run(args.run)
    lines = scale.drain(run, SystemClock(), args.slot)
    _print_answer(args, {"run": run.url, "slot": args.slot, "messages": lines}, *lines)
    return 0


def _stop(args: Namespace) -> int:
    if args.all or args.executor or not args.run:
        return _stop_all(args)
    from executors.cli.changing import scale
    from executors.cli.opening import reach_store
    from executors.supervision.purge import purge_run
    from executors.supervision.shutdown import stop_run
    from rendezvous.clock import SystemClock

    url = run_url.checked_url(args.run)
    store = reach_store(url)
    words = sys.stderr if args.json else sys.stdout
    found = stop_run(store, SystemClock(), args.grace, lambda text: print(text, file=words, flush=True))
    live = [end.name for end in found if end.live]
    ends = [{"name": e.name, "live": e.live, "text": e.text} for e in found]
    over = scale.after_stop_words(store, found=bool(found))
    rows = [f"  {end.name:12s} {end.text}" for end in found]
    purged = purge_run(store) if args.purge and not live else []
    _print_answer(
        args, {"run": url, "live": live, "ends": ends, "purged": purged}, *rows, *([] if live else [over]), *purged
    )
    if live:
        advice = "; nothing was purged" if args.purge else ""
        print(f"diloco stop: {', '.join(live)} may still run; try again, or look there{advice}", file=sys.stderr)
    return 1 if live else 0


SWEPT_S = 120.0  # for a platform to say that cancelled processes have ended


def _stop_all(args: Namespace) -> int:
    from executors.platforms.multi import Place, make_executor

    if args.run or not (args.all and args.executor):
        raise run_url.UsageError("`diloco stop RUN` ends one run; `diloco stop --executor NAME --all` what lives there")
    from executors.preflight import quote

    executor = make_executor(Place(args.executor))
    try:
        found = executor.sweep_all(dry_run=True)
        _say("\n".join(found))
        if found and not quote.yes("end them?", args.yes):
            _say("nothing was ended; --yes ends them without asking")
            return 130
        ended = executor.sweep_all() if found else []
        until = time.monotonic() + SWEPT_S
        while (left := executor.sweep_all(dry_run=True)) and time.monotonic() < until:
            time.sleep(1.0)
    finally:
        executor.close()
    words = [*(f"ended {what}" for what in ended), *(f"still there: {what}" for what in left)]
    nothing = f"nothing of this project lives on {args.executor}"
    _print_answer(args, {"executor": args.executor, "ended": ended, "live": left}, *(words or [nothing]))
    return 1 if left else 0


# -------------------------------------------------------------------- writing, checking


def _export(args: Namespace) -> int:
    from executors.cli.opening import reach_run
    from executors.cli.target import mark_export, refuse_export

    run = reach_run(args.run)  # before the heavy import: a wrong path is told at once
    refuse_export(Path(args.to))
    from diloco.model.export import export

    step = export(run.url, _best_step(run, args.step) if args.best else args.step, Path(args.to), args.merge)
    mark_export(Path(args.to), run.url, step)
    is_adapter = run.config.inner.lora is not None and not args.merge
    what, reader = ("adapter", "PEFT's") if is_adapter else ("model", "transformers'")
    text = f"wrote the {what} after {step} outer steps to {args.to}; {reader} from_pretrained reads it"
    _print_answer(args, {"run": run.url, "outer_step": step, "to": args.to}, text)
    return 0


def _verify(args: Namespace) -> int:
    from executors.cli.opening import reach_run

    run = reach_run(args.run)
    from diloco.audit.verify import verify

    verdict = verify(run, args.step)
    _print_sentences(args, {"run": run.url, **verdict.to_dict()}, verdict.lines())
    return 0 if verdict.good else 1


def _explain(args: Namespace) -> int:
    from executors.cli.opening import reach_run

    run = reach_run(args.run)
    from diloco.audit.explain import explain, explain_dict
    from diloco.audit.step_facts import read_step

    facts = read_step(run, args.step)
    _print_sentences(args, {"run": run.url, **explain_dict(facts)}, explain(facts))
    return 0


def _bisect(args: Namespace) -> int:
    from executors.cli.looking.back import bisect_answer
    from executors.cli.opening import reach_run

    data, lines = bisect_answer(reach_run(args.run), args, _say)
    _print_sentences(args, data, lines)
    return 0


def _blame(args: Namespace) -> int:
    from executors.cli.looking.back import blame_answer
    from executors.cli.opening import reach_run

    data, lines = blame_answer(reach_run(args.run), args)
    _print_sentences(args, data, lines)
    return 0


def _gc(args: Namespace) -> int:
    from executors.cli.looking.back import gc_answer
    from executors.cli.opening import reach_run

    data, lines = gc_answer(reach_run(args.run), args, _is_deletion_agreed)
    _print_sentences(args, data, lines)
    return 0


def _is_deletion_agreed(lines: list[str]) -> bool:
    """Ask on a terminal; raise UsageError elsewhere, where a person has to say --yes."""
    from executors.preflight import quote

    if not sys.stdin.isatty():
        raise run_url.UsageError("what is deleted does not come back. Say --yes, or look first with --dry-run")
    _say("\n".join(fit_lines(lines, sys.stderr)))
    return quote.yes("delete them?", agreed=False)


def _best_step(run: "Run", step: int | None) -> int:
    """The step whose θ did best on the held-out prompts, of those that are kept.

    Raises ConfigError where none was evaluated, or where `step` is given as well."""
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
    print(f"best: step {best.step}, held out {kind} {score_words(score)} on {prompts_words(best)}", file=sys.stderr)
    return best.step


def _eval(args: Namespace) -> int:
    from executors.cli.opening import reach_run

    run = reach_run(args.run)
    prompts = _held_out_file(args.prompts, run.config) if args.prompts else None
    from diloco.audit.offline_eval import evaluate_step
    from diloco.runlog.evaluation import evaluation_dict, evaluation_words

    found = evaluate_step(run, args.step, prompts=prompts, samples=args.samples, report_progress=_say)
    _print_answer(args, {"run": run.url, **evaluation_dict(found)}, f"held out {evaluation_words([found])}")
    return 0


def _held_out_file(spelling: str, config: "RunConfig") -> Path:
    """The file that is named, or one with the rows of a dataset of the Hub."""
    from diloco.run.data_files import gather_rows
    from inner.settings.flat_names import EVAL
    from inner.settings.task import is_one_file

    if not is_one_file(spelling):
        return gather_rows(EVAL, spelling, Path(), config.inner.data, _say)[1]
    if not Path(spelling).is_file():
        raise run_url.UsageError(f"--prompts: there is no file {spelling}")
    return Path(spelling)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _report(args: Namespace) -> int:
    from diloco.runlog.opening import open_view
    from diloco.runlog.reader import Reader, summary
    from diloco.runlog.scope import EVERYTHING
    from executors.cli.looking import status
    from executors.cli.looking.report import publish_page, write_page
    from executors.cli.opening import patient_store

    view = open_view(run_url.checked_url(args.run), EVERYTHING)
    report = Reader(view.run.store, EVERYTHING, view.cache, view.answers).refresh()
    folder = Path(args.to) if args.to else Path(getattr(view.run.store, "root", "."))
    now = time.time()
    page = write_page(report, view.run.store, folder, now)
    data = {**status.status_dict(report, now), "page": str(page)}
    wrote = f"\nwrote {page}"
    if args.png:
        from diloco.views.page.charts import write_picture

        data["picture"] = str(write_picture(report, folder))
        wrote += f" and {data['picture']}"
    if args.publish:
        data["published"] = publish_page(report, patient_store(view.run.store), now)
        wrote += f"\npublished: {data['published']}"
    _print_answer(args, data, summary(report), wrote)
    return 0


def _diff(args: Namespace) -> int:
    from diloco.runlog.opening import open_view
    from diloco.runlog.reader import Reader
    from diloco.runlog.scope import EVERYTHING
    from diloco.views.comparison import compare_runs

    views = [open_view(run_url.checked_url(url), EVERYTHING) for url in (args.old, args.new)]
    old, new = (Reader(view.run.store, EVERYTHING, view.cache, view.answers).refresh() for view in views)
    found = compare_runs((views[0].run.record, views[1].run.record), (old, new))
    _print_answer(args, {"old": args.old, "new": args.new, **found.to_dict()}, *found.lines(args.old, args.new))
    return 0


def _traces(args: Namespace) -> int:
    from executors.cli.opening import reach_run

    run = reach_run(args.run)
    from diloco.model.traces import freeze

    made = freeze(run.store, Path(args.to))
    text = "wrote {states} states of {rollouts} rollouts to {to}; in {errors} of them the action failed"
    _print_answer(args, {"run": run.url, "to": args.to, **made}, text.format(to=args.to, **made))
    return 0


def _track(args: Namespace) -> int:
    from executors.cli.starting.foreground import say
    from executors.cli.writing.track import track
    from rendezvous.clock import SystemClock

    url = run_url.checked_url(args.run)
    done = track(args, url, SystemClock(), say)
    _print_answer(args, {"run": url, **done.data}, *done.lines)
    return 0 if done.good else 1


def _doctor(args: Namespace) -> int:
    from executors.cli.checking.doctor import doctor

    table, good = doctor(run_url.checked_url(args.url), args.parameters, args.config, args.replicas)
    _print_answer(args, {"url": args.url, "good": good, "table": table.splitlines()}, table)
    return 0 if good else 2


def _setup(args: Namespace) -> int:
    from executors.cli.checking import setup
    from executors.preflight.quote import yes
    from rendezvous.clock import SystemClock

    clock = SystemClock()
    url = run_url.checked_url(args.run or setup.default_url(args.place, clock))
    steps = list[setup.SetupStep]()
    for step in setup.setup(args.place, url, args.secret, clock, lambda text: yes(text, args.yes), os.environ):
        steps.append(step)
        if not args.json:
            _print_answer(args, {}, step.line, *([f"  next: {step.todo}"] if step.todo else []))
    good = not any(step.todo for step in steps)
    typed = setup.next_command(args.place, url, args.secret)
    answer = {"good": good, "steps": [vars(step) for step in steps], "command": typed}
    lines = ["all there. A first run, of a few minutes and cents (with `plan` for `train` it says its price):", typed]
    _print_answer(args, answer, *(lines if good else []))
    return 0 if good else 2


def _init(args: Namespace) -> int:
    from executors.cli.checking.init import init

    names = init(Path(args.folder), model=args.model, task=args.task)
    steps = [
        f"cd {shlex.quote(args.folder)}",
        "python test_rewards.py                         # the reward, without a model",
        "diloco check run.toml                          # the reward on three prompts, with the model's tokenizer",
        "diloco plan run.toml --run runs/first          # what it would do; starts nothing",
        "diloco train run.toml --run runs/first",
    ]
    lines = [f"wrote {', '.join(names)}. Next:", *(f"  {step}" for step in steps)]
    _print_answer(args, {"folder": args.folder, "files": names}, *lines)
    return 0


def _check(args: Namespace) -> int:
    from dataclasses import asdict

    from executors.cli.checking.check import check_lines
    from inner.usercode.trial import try_reward

    config = _read_config(args)
    found = try_reward(config.inner, config.user_files(), rows=args.rows, given=args.completion)
    rewards = config.inner.rewards
    tried = ", ".join(rewards.named.values()) or str(config.inner.scoring_task)
    models = [f"not asked here: {spelling}, a reward model" for spelling in rewards.models.values()]
    _print_answer(args, asdict(found), *check_lines(found, tried), *models)
    return 0


def _objectives(args: Namespace) -> int:
    from dataclasses import asdict

    from diloco.run.config import load_config
    from inner.settings.objectives import PO_OBJECTIVES, format_menu

    settings = {}
    about = []
    if args.config:
        inner = load_config(args.config).inner
        settings = {
            "gradient_accumulation_steps": inner.gradient_accumulation_steps,
            "steps_per_generation": inner.grpo.steps_per_generation,
            "num_iterations": inner.grpo.num_iterations,
        }
        about = [f"{args.config} has inner.grpo.objective = {inner.grpo.objective!r}\n"]
    _print_answer(args, {name: asdict(o) for name, o in PO_OBJECTIVES.items()}, *about, format_menu(settings))
    return 0


def _demo(args: Namespace) -> int:
    from executors.cli.starting.demo import demo

    if args.run and not run_url.is_folder(args.run):
        raise run_url.UsageError(
            f"the demo lives in a folder of this machine, not at {args.run}; use e.g. --run runs/demo"
        )
    folder = Path(run_url.shareable_url(args.run).removeprefix("file://")) if args.run else None
    if not args.json:
        return demo(folder)
    with redirect_stdout(sys.stderr):
        code = demo(folder)
    _print_answer(args, {"code": code})
    return code


def _completion(args: Namespace) -> int:
    from executors.cli.completion import completion_script, slots_of

    if args.slots is not None:
        found = slots_of(args.slots, sessions=args.verb == "logs")
        _print_answer(args, {"run": args.slots, "slots": found}, *found)
        return 0
    text = completion_script(make_parser(), args.shell)
    _print_answer(args, {"shell": args.shell, "script": text}, text)
    return 0


VERBS: dict[str, Callable[[Namespace], int]] = {
    "train": _train, "plan": _plan, "resume": _resume, "status": _status, "logs": _logs, "costs": _costs,
    "scale": _scale, "drain": _drain, "stop": _stop, "export": _export, "verify": _verify, "explain": _explain,
    "blame": _blame, "bisect": _bisect, "gc": _gc, "diff": _diff, "eval": _eval, "watch": _watch,
    "report": _report, "traces": _traces, "track": _track, "init": _init, "check": _check, "doctor": _doctor,
    "setup": _setup, "objectives": _objectives, "demo": _demo, "completion": _completion,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
