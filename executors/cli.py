"""The command `diloco`: one verb per intent, and a clear word when something is wrong.

    diloco VERB …  ──executors/parser.py──▶  args  ──▶  _verb(args)  ──▶  exit code

A verb's own imports happen when it is used, so that `--help` and `status` answer at once.

Not promised: stable words for people; programs read --json.
"""

import json
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from executors import address
from executors.parser import make_parser

if TYPE_CHECKING:
    from diloco.config import RunConfig
    from diloco.launch import Run
    from executors.intent import Offer
    from executors.money import Costs
    from executors.preflight import Checked
    from rendezvous.membership import Wanted


def main(argv: list[str] | None = None) -> int:
    args = make_parser().parse_args(argv)
    try:
        _follow(args)
        return VERBS[args.command](args)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `diloco status RUN | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("DILOCO_DEBUG") or not _expected(error):
            raise
        print(f"diloco {args.command}: {error}", file=sys.stderr)
        return 2


def _follow(args: Namespace) -> None:
    """Where the run that was named is now: a run that was founded again goes by its first name."""
    if getattr(args, "run", None) is None or args.command in ("demo", "plan", "completion"):
        return
    from diloco.superseded import current

    args.run = current(address.checked(args.run))


def _expected(error: Exception) -> bool:
    """Errors that say what to do next; anything else is a defect, and keeps its traceback."""
    from diloco.config import ConfigError
    from diloco.drawing import ReportError
    from executors.base import ExecutorError
    from inner import InnerError
    from rendezvous.errors import RendezvousError

    known = ConfigError | InnerError | RendezvousError | OSError | address.UsageError | ReportError | ExecutorError
    return isinstance(error, known)


def _tell(args: Namespace, data: dict[str, Any], *lines: str) -> None:
    """The answer, for programs or for people."""
    if args.json or lines:
        print(json.dumps(data, indent=1) if args.json else "\n".join(lines), flush=True)


# -------------------------------------------------------------------- starting


def _train(args: Namespace) -> int:
    from diloco.config import load_config
    from diloco.launch import open_run
    from executors import intent
    from executors.foreground import say
    from rendezvous.clock import SystemClock
    from rendezvous.membership import read_control
    from rendezvous.store import open_store

    config, url = load_config(args.config), address.shareable(args.run)
    for note in _checked(args, config, url, read_control(open_store(url))).notes:
        say(note)
    offer = _offer(args, url, config.fleet.replicas, config=config)
    if not _agreed(args, offer):
        return 130
    if args.again:
        from executors.again import found_again

        url = args.run = found_again(config, url, SystemClock(), say)
    address.make_folder(url)
    wishes = {"replicas": _replicas(args), "steps": args.steps, "min_replicas": args.min_replicas}
    run = open_run(config, url, SystemClock(), **wishes)
    intent.remember(run.store, SystemClock(), offer)
    if run.record.why_codec:
        say(f"codec {run.record.codec}: {run.record.why_codec}")
    return _supervised(run, args, read_control(run.store))


def _resume(args: Namespace) -> int:
    from diloco.launch import read_run
    from executors import intent
    from rendezvous.clock import SystemClock
    from rendezvous.membership import read_control, refuse_lost

    url = address.shareable(args.run)
    run = read_run(url)
    wanted = read_control(run.store)
    refuse_lost(run.store, wanted)
    offer = _offer(args, url, wanted.replicas)
    if not _agreed(args, offer):
        return 130
    wishes = {"replicas": _replicas(args), "steps": args.steps, "min_replicas": args.min_replicas}
    intent.wish(run, SystemClock(), **{k: v for k, v in wishes.items() if v})
    intent.remember(run.store, SystemClock(), offer)
    return _supervised(run, args, read_control(run.store))


def _plan(args: Namespace) -> int:
    from diloco.config import load_config
    from executors import intent, outlook
    from executors.money import Costs

    config, url = load_config(args.config), address.shareable(args.run) if args.run else ""
    bucket = outlook.look(url)
    url = bucket.url
    checked = _checked(args, config, url, bucket.wanted)
    named = outlook.somewhere(url, intent.wanted_places(args, bucket.wanted.places), intent.FAR)
    offer = _offer(
        args, named, config.fleet.replicas, bucket.wanted, None if url and not bucket.note else Costs(), config
    )
    sizes = outlook.sizes(
        config, checked.model, _replicas(args) or config.fleet.replicas, args.steps or config.fleet.steps
    )
    notes = [note for note in (*checked.notes, bucket.note) if note]
    data = {"run": url, **offer.to_dict(), "sizes": sizes, "notes": notes}
    _tell(args, data, *offer.lines(), *sizes, *notes, "nothing was started")
    return 0


def _checked(args: Namespace, config: "RunConfig", url: str, wanted: "Wanted") -> "Checked":
    """What can be seen to be wrong before anything is founded.  Raises UsageError."""
    from executors import intent
    from executors.preflight import Checked, preflight

    places = intent.wanted_places(args, wanted.places)
    intent.check_reach(url or "s3://", places)
    return Checked() if args.no_preflight else preflight(config, args.config, url, places)


def _offer(
    args: Namespace,
    url: str,
    replicas: int,
    wanted: "Wanted | None" = None,
    spent: "Costs | None" = None,
    config: "RunConfig | None" = None,
) -> "Offer":
    """What starting it would do and cost.   replicas, wanted, spent: where nothing else is said or read."""
    from executors import intent
    from rendezvous.membership import read_control
    from rendezvous.store import open_store

    wanted = read_control(open_store(url)) if wanted is None else wanted
    places = intent.wanted_places(args, wanted.places)
    places = places if config is None else intent.sized(places, config)
    intent.check_reach(url, places)
    slots = intent.slots_of(_replicas(args) or replicas)
    return intent.make_offer(url, places, slots, intent.limits(args, wanted), _spent(url) if spent is None else spent)


def _replicas(args: Namespace) -> int | None:
    from executors import intent
    from executors.mixed import Place

    named = intent.replicas_in([Place.from_dict(p) for p in args.places or ()])
    if named and args.replicas and args.replicas < named:
        raise address.UsageError(f"--place names {named} replicas, --replicas {args.replicas}; leave one of them away")
    return args.replicas or named


def _spent(url: str) -> "Costs":
    from diloco.launch import read_run
    from diloco.report import read_report
    from diloco.runlog.cache import cache_of
    from diloco.runlog.scope import COSTS
    from executors.money import Costs, costs
    from rendezvous import layout
    from rendezvous.store import open_store

    if open_store(url).get(layout.RUN) is None:
        return Costs()
    run = read_run(url)
    return costs(read_report(run.store, COSTS, cache_of(run)), time.time())


def _agreed(args: Namespace, offer: "Offer") -> bool:
    from executors import intent
    from executors.foreground import say

    if not offer.free:
        say("\n".join(f"  {line}" for line in offer.lines()))
    return intent.agree(offer, args.yes)


def _supervised(run: "Run", args: Namespace, wanted: Any) -> int:
    from diloco.launch import solo_warning
    from executors import foreground
    from executors.watch import view_for

    if text := solo_warning(wanted):
        foreground.say(f"warning: {text}")
    if args.detach:
        return _detached(run, args)
    outcome = foreground.supervise_here(run, view=view_for(sys.stderr if args.json else sys.stdout))
    if args.json:
        _tell(args, {"run": run.url, "code": outcome.code, "text": outcome.text})
    else:
        foreground.say(outcome.text)
    if outcome.code in (4, 75):
        foreground.say(f"to go on: diloco resume {args.run}")
    if outcome.code == 0:
        foreground.say(f"next: diloco report {args.run}, or diloco export {args.run} --to DIR")
    return outcome.code


def _detached(run: "Run", args: Namespace) -> int:
    from executors.detached import hand_over
    from executors.foreground import say
    from rendezvous.clock import SystemClock

    found = hand_over(run, SystemClock(), say)
    begun = found.started
    data = {"run": run.url, "started": begun is not None and found.code == 0, "code": found.code, "text": found.text}
    if begun is not None:
        data |= {"pid": begun.pid, "native": begun.native, "log": begun.log}
    _tell(args, data, found.text, f"  diloco status {args.run}", f"  diloco stop {args.run}")
    return found.code


# -------------------------------------------------------------------- looking


def _status(args: Namespace) -> int:
    from diloco.launch import read_run
    from diloco.report import Reader
    from diloco.runlog.cache import cache_of
    from diloco.runlog.scope import STATUS
    from executors import watch
    from executors.money import costs
    from executors.supervision import supervision
    from rendezvous.clock import SystemClock

    run = read_run(address.checked(args.run))
    reader = Reader(run.store, STATUS, cache_of(run))
    report, now, columns = reader.refresh(), time.time(), shutil.get_terminal_size().columns
    last, supervisor = supervision(reader.ahead, SystemClock(), report)
    spent, table = costs(report, now), watch.table(report, now, columns)
    money = [f"  {watch.cost_line(spent, report.wanted)}"] if spent.usd or spent.unknown else []
    data = {**watch.status(report, now), **watch.cost_status(spent, report.wanted), **supervisor}
    _tell(args, data, *table, *money, f"  {last}")
    return 0


def _logs(args: Namespace) -> int:
    from diloco.launch import read_run
    from executors import look
    from rendezvous.membership import read_control

    run = read_run(address.checked(args.run))
    with look.log_of(run.url, read_control(run.store), args.slot) as log:
        if not args.follow:
            lines = log.lines(args.tail)
            _tell(args, {"slot": args.slot, "handle": log.handle, "lines": lines}, *lines)
            return 0
        for line in log.follow(args.tail):
            print(json.dumps({"slot": args.slot, "line": line}) if args.json else line, flush=True)
    return 0


def _costs(args: Namespace) -> int:
    from diloco.launch import read_run
    from diloco.report import read_report
    from diloco.runlog.cache import cache_of
    from diloco.runlog.scope import COSTS
    from executors import watch
    from executors.money import costs

    run = read_run(address.checked(args.run))
    report = read_report(run.store, COSTS, cache_of(run))
    spent = costs(report, time.time())
    data = {"name": report.name, "url": run.url, **spent.to_dict(), **watch.cost_status(spent, report.wanted)}
    _tell(args, data, *watch.cost_table(spent, report))
    return 0


# -------------------------------------------------------------------- changing


def _scale(args: Namespace) -> int:
    from diloco.launch import read_run
    from executors import change
    from rendezvous.clock import SystemClock

    run = read_run(address.checked(args.run))
    offer = change.growth(run, args.replicas, args.min_replicas, _spent(run.url))
    if offer is not None and not _agreed(args, offer):
        return 130
    told = change.scale(run, SystemClock(), args.replicas, args.min_replicas)
    _tell(args, {"run": run.url, "replicas": args.replicas, "told": told}, *told)
    return 0


def _drain(args: Namespace) -> int:
    from diloco.launch import read_run
    from executors import change
    from rendezvous.clock import SystemClock

    run = read_run(address.checked(args.run))
    told = change.drain(run, SystemClock(), args.slot)
    _tell(args, {"run": run.url, "slot": args.slot, "told": told}, *told)
    return 0


def _stop(args: Namespace) -> int:
    from diloco.launch import store_of
    from executors.stop import stop_run
    from rendezvous.clock import SystemClock

    url, words = address.checked(args.run), sys.stderr if args.json else sys.stdout
    found = stop_run(store_of(url), SystemClock(), args.grace, lambda text: print(text, file=words, flush=True))
    live = [end.name for end in found if end.live]
    ends = [{"name": e.name, "live": e.live, "text": e.text} for e in found]
    over = "nobody runs any more; `diloco resume` goes on" if found else "nobody ever ran here"
    rows = [f"  {end.name:12s} {end.text}" for end in found]
    _tell(args, {"run": url, "live": live, "ends": ends}, *rows, *([] if live else [over]))
    if live:
        print(f"diloco stop: {', '.join(live)} may still run; try again, or look there", file=sys.stderr)
    return 1 if live else 0


# -------------------------------------------------------------------- writing, checking


def _export(args: Namespace) -> int:
    from diloco.launch import read_run

    run = read_run(address.checked(args.run))  # before the heavy import: a wrong path is told at once
    from diloco.history import export

    step = export(run.url, args.step, Path(args.to))
    told = f"wrote the model after {step} outer steps to {args.to}; transformers' from_pretrained reads it"
    _tell(args, {"run": run.url, "outer_step": step, "to": args.to}, told)
    return 0


def _report(args: Namespace) -> int:
    from diloco.drawing import write_report
    from diloco.launch import read_run
    from diloco.report import read_report, summary
    from diloco.runlog.cache import cache_of
    from diloco.runlog.scope import EVERYTHING
    from executors import watch

    run = read_run(address.checked(args.run))
    report = read_report(run.store, EVERYTHING, cache_of(run))
    folder = Path(args.to) if args.to else Path(getattr(run.store, "root", "."))
    page, png = write_report(report, folder)
    data = {**watch.status(report, time.time()), "page": str(page), "picture": str(png)}
    _tell(args, data, summary(report), f"\nwrote {page} and {png}")
    return 0


def _traces(args: Namespace) -> int:
    from diloco.launch import read_run

    run = read_run(address.checked(args.run))
    from diloco.traces import freeze

    made = freeze(run.store, Path(args.to))
    text = "wrote {states} states of {rollouts} rollouts to {to}; in {errors} of them the action failed"
    _tell(args, {"run": run.url, "to": args.to, **made}, text.format(to=args.to, **made))
    return 0


def _doctor(args: Namespace) -> int:
    from executors.doctor import doctor

    table, good = doctor(address.checked(args.url), args.parameters, args.config, args.replicas)
    _tell(args, {"url": args.url, "good": good, "table": table.splitlines()}, table)
    return 0 if good else 2


def _setup(args: Namespace) -> int:
    from executors import setup
    from executors.intent import yes
    from rendezvous.clock import SystemClock

    clock = SystemClock()
    url = address.checked(args.run or setup.default_url(args.place, clock))
    steps = list[setup.Step]()
    for step in setup.setup(args.place, url, args.secret, clock, lambda text: yes(text, args.yes), os.environ):
        steps.append(step)
        if not args.json:
            _tell(args, {}, step.line, *([f"  next: {step.todo}"] if step.todo else []))
    good = not any(step.todo for step in steps)
    typed = setup.command(args.place, url, args.secret)
    told = {"good": good, "steps": [vars(step) for step in steps], "command": typed}
    lines = ["all there. A first run, of a few minutes and cents (with `plan` for `train` it says its price):", typed]
    _tell(args, told, *(lines if good else []))
    return 0 if good else 2


def _objectives(args: Namespace) -> int:
    from dataclasses import asdict

    from diloco.config import load_config
    from inner.objectives import PO_OBJECTIVES, menu

    settings, about = {}, []
    if args.config:
        inner = load_config(args.config).inner
        chosen = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")
        settings = {name: getattr(inner, name) for name in chosen}
        about = [f"{args.config} has objective = {inner.objective!r}\n"]
    _tell(args, {name: asdict(o) for name, o in PO_OBJECTIVES.items()}, *about, menu(settings))
    return 0


def _demo(args: Namespace) -> int:
    from executors.demo import demo

    if args.run and not address.is_folder(args.run):
        raise address.UsageError(
            f"the demo lives in a folder of this machine, not at {args.run}; use e.g. --run runs/demo"
        )
    folder = Path(address.shareable(args.run).removeprefix("file://")) if args.run else None
    if not args.json:
        return demo(folder)
    with redirect_stdout(sys.stderr):
        code = demo(folder)
    _tell(args, {"code": code})
    return code


def _completion(args: Namespace) -> int:
    from executors.completion import script, slots_of

    if args.slots is not None:
        found = slots_of(args.slots, lives=args.verb == "logs")
        _tell(args, {"run": args.slots, "slots": found}, *found)
        return 0
    text = script(make_parser(), args.shell)
    _tell(args, {"shell": args.shell, "script": text}, text)
    return 0


VERBS: dict[str, Callable[[Namespace], int]] = {
    "train": _train, "plan": _plan, "resume": _resume, "status": _status, "logs": _logs, "costs": _costs,
    "scale": _scale, "drain": _drain, "stop": _stop, "export": _export, "report": _report, "traces": _traces,
    "doctor": _doctor, "setup": _setup, "objectives": _objectives, "demo": _demo, "completion": _completion,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
