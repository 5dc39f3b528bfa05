"""The command `diloco`: one verb per intent, and a clear word when something is wrong.

    train CONFIG --run URL    status RUN    stop RUN    export RUN --to DIR    report RUN    doctor URL    demo
    objectives [CONFIG]

A verb's own imports happen when it is used, so that `--help` and `status` answer at once.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diloco.launch import Run

EXIT_CODES = """\
exit codes:
  0    done; for `demo`: every check held; for `stop`: nobody runs any more
  1    something failed (a replica that crashes again and again, a check that does not hold)
  2    a mistake in the command, the config, a file, or the run's URL: starting again changes nothing;
       for `doctor`: the store cannot carry a run
  3    another supervisor has taken over this run
  4    ended before the last outer step, because somebody asked; the same command resumes
  75   nothing moved for too long; the same command resumes

DILOCO_DEBUG=1 shows the traceback behind an error.  DILOCO_RUN_KEY, set for whoever takes part, seals a run's
records: what others write into its bucket does not count (docs/protocol.md).
A run is a folder (runs/demo, file:///an/absolute/path) or lies in a bucket (s3://bucket/prefix, gs://…, az://…,
hf://buckets/namespace/bucket/prefix)."""


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return args.verb(args)
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


def _expected(error: Exception) -> bool:
    """Errors that say what to do next; anything else is a defect, and keeps its traceback."""
    from diloco.config import ConfigError
    from diloco.drawing import ReportError
    from inner import InnerError
    from rendezvous.errors import RendezvousError

    return isinstance(error, ConfigError | InnerError | RendezvousError | OSError | UsageError | ReportError)


class UsageError(ValueError):
    """The command cannot mean anything."""


def _train(args: argparse.Namespace) -> int:
    from diloco.config import load_config
    from diloco.launch import open_run, solo_warning
    from executors import foreground
    from rendezvous.clock import SystemClock
    from rendezvous.membership import read_control

    url = _shareable(args.run)
    wishes = {"replicas": args.replicas, "steps": args.steps, "min_replicas": args.min_replicas}
    config = load_config(args.config)
    _make_folder(url)
    run = open_run(config, url, SystemClock(), **wishes)
    if run.record.why_codec:
        foreground.say(f"codec {run.record.codec}: {run.record.why_codec}")
    if text := solo_warning(read_control(run.store)):
        foreground.say(f"warning: {text}")
    if args.detach:
        return _detached(run, args)
    outcome = foreground.supervise_here(run)
    foreground.say(outcome.text)
    if outcome.code in (4, 75):
        foreground.say(f"the same command resumes it: diloco train {args.config} --run {args.run}")
    if outcome.code == 0:
        foreground.say(f"next: diloco report {args.run}, or diloco export {args.run} --to DIR")
    return outcome.code


def _detached(run: "Run", args: argparse.Namespace) -> int:
    from executors import foreground
    from executors.lease import supervisor_of

    if (other := supervisor_of(run.store)) is not None:
        print(f"process {other.pid} on {other.host} supervises this run already; it has heard your wishes")
    else:
        started = foreground.detach(run)
        verb = "resumed" if run.resumed else "started"
        print(f"{verb} {args.run}, supervised by pid {started.pid}, log {started.log}")
    print(f"  diloco status {args.run}\n  diloco stop {args.run}")
    return 0


def _status(args: argparse.Namespace) -> int:
    from diloco.launch import read_run
    from diloco.report import read_report
    from executors import watch
    from executors.lease import supervisor_of

    run = read_run(_checked(args.run))
    report, supervisor, now = read_report(run.store), supervisor_of(run.store), time.time()
    if args.json:
        holder = None if supervisor is None else {"pid": supervisor.pid, "host": supervisor.host}
        print(json.dumps({**watch.status(report, now), "supervisor": holder}, indent=1))
        return 0
    who = f"supervised by pid {supervisor.pid} on {supervisor.host}" if supervisor else "nobody supervises it"
    state = "done" if report.done else who
    print("\n".join([*watch.table(report, now), f"  {state}"]))
    return 0


def _stop(args: argparse.Namespace) -> int:
    from diloco.launch import read_run
    from executors.stop import stop_run
    from rendezvous.clock import SystemClock

    run = read_run(_checked(args.run))
    found = stop_run(run.store, SystemClock(), args.grace, lambda text: print(text, flush=True))
    for end in found:
        print(f"  {end.name:12s} {end.text}")
    live = [end.name for end in found if end.live]
    if live:
        print(f"diloco stop: {', '.join(live)} may still run; try again, or look there", file=sys.stderr)
        return 1
    print("nobody runs any more; the same `diloco train` command resumes" if found else "nobody ever ran here")
    return 0


def _export(args: argparse.Namespace) -> int:
    from diloco.launch import read_run

    run = read_run(_checked(args.run))  # before the heavy import: a wrong path is told at once
    from diloco.history import export

    step = export(run.url, args.step, Path(args.to))
    print(f"wrote the model after {step} outer steps to {args.to}; transformers' from_pretrained reads it")
    return 0


def _report(args: argparse.Namespace) -> int:
    from diloco.drawing import write_report
    from diloco.launch import read_run
    from diloco.report import read_report, summary

    run = read_run(_checked(args.run))
    report = read_report(run.store)
    print(summary(report))
    folder = Path(args.to) if args.to else Path(getattr(run.store, "root", "."))
    page, png = write_report(report, folder)
    print(f"\nwrote {page} and {png}")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from executors.doctor import doctor

    table, good = doctor(_checked(args.url), args.parameters, args.config, args.replicas)
    print(table)
    return 0 if good else 2


def _objectives(args: argparse.Namespace) -> int:
    from diloco.config import load_config
    from inner.objectives import menu

    settings = {}
    if args.config:
        inner = load_config(args.config).inner
        chosen = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")
        settings = {name: getattr(inner, name) for name in chosen}
        print(f"{args.config} has objective = {inner.objective!r}\n")
    print(menu(settings))
    return 0


def _demo(args: argparse.Namespace) -> int:
    from executors.demo import demo

    if args.run and not _is_folder(args.run):
        raise UsageError(f"the demo lives in a folder of this machine, not at {args.run}; use e.g. --run runs/demo")
    return demo(Path(_shareable(args.run).removeprefix("file://")) if args.run else None)


def _shareable(url: str) -> str:
    """A run that several processes can see."""
    if url.startswith("memory://"):
        raise UsageError(f"{url} lives inside one process, replicas are several; use a folder, e.g. --run runs/mine")
    return _checked(url)


def _is_folder(url: str) -> bool:
    return url.startswith("file://") or "://" not in url


def _make_folder(url: str) -> None:
    if not _is_folder(url):
        return
    try:
        Path(url.removeprefix("file://")).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make the folder {url}: {error.strerror}. Use another one for --run") from None


def _checked(url: str) -> str:
    """A run that this version can open."""
    from rendezvous.store import open_store

    try:
        open_store(url)
    except (ValueError, ImportError) as error:
        raise UsageError(str(error)) from None
    return url


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="diloco",
        description="Train one model on replicas that meet only in a bucket.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="command", metavar="VERB", required=True)
    train = _verb(verbs, "train", _train, "start a run, or resume it: the same command does both")
    train.add_argument("config", metavar="CONFIG", help="the run.toml")
    train.add_argument("--run", required=True, metavar="URL", help="where the run lives: runs/mine, s3://bucket/prefix")
    train.add_argument("--replicas", type=_positive, metavar="N", help="replicas to keep (default: as in CONFIG)")
    train.add_argument("--steps", type=_positive, metavar="T", help="outer steps in all (default: as in CONFIG)")
    train.add_argument("--min-replicas", type=_positive, metavar="M", help="offers that every outer step needs")
    train.add_argument("--detach", action="store_true", help="return at once; the run goes on without this terminal")
    status = _verb(verbs, "status", _status, "what a run is doing")
    status.add_argument("run", metavar="RUN")
    status.add_argument("--json", action="store_true", help="for programs")
    stop = _verb(verbs, "stop", _stop, "end every replica of a run, and prove it")
    stop.add_argument("run", metavar="RUN")
    stop.add_argument("--grace", type=float, default=20.0, metavar="S", help="seconds before a kill (default 20)")
    export = _verb(verbs, "export", _export, "write a step's model as a from_pretrained folder")
    export.add_argument("run", metavar="RUN")
    export.add_argument("--step", type=int, metavar="T", help="after T outer steps (default: the newest)")
    export.add_argument("--to", required=True, metavar="DIR")
    report = _verb(verbs, "report", _report, "draw report.html and report.png")
    report.add_argument("run", metavar="RUN")
    report.add_argument("--to", metavar="DIR", help="where to (default: the run's folder; here, for a bucket)")
    doctor = _verb(verbs, "doctor", _doctor, "can this store carry a run, and what does one sync take and cost")
    doctor.add_argument("url", metavar="URL")
    size = doctor.add_mutually_exclusive_group()
    size.add_argument("--parameters", type=_count, metavar="N", help="of the model, e.g. 600M or 1.7B")
    size.add_argument("--config", metavar="CONFIG", help="a run.toml: its model, codec and replicas")
    doctor.add_argument("--replicas", type=_positive, metavar="N", help="default: as in CONFIG, else 4")
    objectives = _verb(verbs, "objectives", _objectives, "inner.objective's menu: formulas, knobs, when to use which")
    objectives.add_argument("config", nargs="?", metavar="CONFIG", help="a run.toml: what would be inert there")
    demo = _verb(verbs, "demo", _demo, "the whole thing on this machine, with a kill -9 on the way")
    demo.add_argument("--run", metavar="DIR", help="default runs/demo; once that is done runs/demo-2, …")
    return parser


def _verb(verbs: Any, name: str, act: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text, epilog="`diloco --help` lists the exit codes.")
    parser.set_defaults(verb=act)
    return parser


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return number


def _count(text: str) -> int:
    """ "1.7B" -> 1_700_000_000"""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; write e.g. 50000000, 50M or 1.7B")
    return round(number)


if __name__ == "__main__":
    sys.exit(main())
