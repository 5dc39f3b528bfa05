"""The grammar of `diloco`: its verbs and options, and the message for a wrong one.

    train plan resume        start, or only say what starting would do     where: --executor --place --gpu …
    status watch logs costs  look                                          how much: --max-usd --max-hours
    scale drain stop         change                                        --json: for programs, everywhere
    export verify explain blame bisect diff eval gc report traces track
    init check setup doctor objectives demo completion

Not promised: that a name exists (a slot, a GPU); the verb or the platform tells.
"""

import argparse
import json
import math
import re
import sys
from typing import Any

from diloco.run.log_config import FOLDER, SAMPLES, TRACKERS
from executors.cli.checking.init import MODEL, TASKS
from executors.cli.completion import SLOTS
from executors.platforms import EXECUTORS
from executors.preflight.mistyped import Parser

EXIT_CODES = """\
exit codes:
  0    done; for `demo`: every check held; for `stop`: no replica runs any more; for `plan`: it could be started (75:
       the bucket, or the model that would be published from here, gave no answer)
  1    something failed (a replica that crashes again and again, a check that does not hold)
  2    a mistake in the command, the config, a file, or the run's URL, or a platform that cannot do it as asked
       (credentials, GPU, price, SDK): starting again changes nothing; for `doctor`: the store cannot carry a run
  3    another supervisor has taken over this run
  4    ended before the last outer step, because somebody asked or the budget is used up; `diloco resume` goes on
  75   nothing moved for too long, or a platform or the bucket gave no answer; `diloco resume`, or the same command
       again, goes on
  130  interrupted, or the price was declined: nothing was started

DILOCO_DEBUG=1 shows the traceback behind an error.  DILOCO_RUN_KEY, set for whoever takes part, seals a run's
records: what others write into its bucket does not count (docs/internals/protocol.md).
A run is a folder (runs/demo, file:///an/absolute/path), lies in a bucket (s3://bucket/prefix, gs://…, az://…,
hf://buckets/namespace/bucket/prefix), or on Modal itself (modal://name/prefix).  docs/operations.md says how to look
after one."""
SHELLS = ("bash", "zsh", "fish")
UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="diloco",
        description="Train one model on replicas that meet only in a bucket.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="which release this is")
    verbs = parser.add_subparsers(dest="command", metavar="VERB", required=True)
    _add_starting_verbs(verbs)
    _add_looking_verbs(verbs)
    _add_changing_verbs(verbs)
    _add_writing_verbs(verbs)
    _add_checking_verbs(verbs)
    return parser


def _add_verb(verbs: Any, name: str, text: str, *positional: tuple[str, str]) -> argparse.ArgumentParser:
    """positional: (name as shown, help)"""
    parser = verbs.add_parser(name, help=text, description=text, epilog="`diloco --help` lists the exit codes.")
    for shown, meaning in positional:
        parser.add_argument(shown.lower(), metavar=shown, help=meaning or None)
    parser.add_argument("--json", action="store_true", help="for programs: JSON on stdout, words on stderr")
    return parser


def _add_starting_verbs(verbs: Any) -> None:
    config = ("CONFIG", "the run.toml")
    train = _add_verb(verbs, "train", "start a run, or resume it: the same command does both", config)
    plan = _add_verb(verbs, "plan", "say what `train` would start and what it costs; nothing is started", config)
    for parser in (train, plan):
        needed = parser is train
        parser.add_argument("--run", required=needed, metavar="URL", help="where the run lies: runs/mine, s3://…")
        parser.add_argument(
            "--set", action="append", default=[], metavar="NAME=VALUE", help="in the place of CONFIG's: inner.lr=2e-6"
        )
        parser.add_argument("--no-preflight", action="store_true", help="do not look for mistakes first")
    resume = _add_verb(verbs, "resume", "go on with a run; all it needs is in the bucket", ("RUN", ""))
    for parser in (train, plan, resume):
        _add_fleet_options(parser)
        _add_place_options(parser)
        _add_budget_options(parser)
    train.add_argument("--again", action="store_true", help="found a run anew in which nothing was trained yet")
    train.add_argument(
        "--from", dest="origin", metavar="OLD[@STEP]", help="begin with another run's weights after STEP outer steps"
    )
    train.add_argument("--momentum", action="store_true", help="with --from: its outer momentum, too")
    for parser in (train, resume):
        parser.add_argument("--detach", action="store_true", help="return once a supervisor elsewhere watches it")
        parser.add_argument("--yes", "-y", action="store_true", help="do not ask whether the price is right")
        parser.add_argument(
            "--alert", metavar="URL", help="a webhook that hears of troubles (or DILOCO_ALERT in the environment)"
        )


def _add_fleet_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--replicas", type=positive, metavar="N", help="replicas to keep (default: as in CONFIG)")
    parser.add_argument("--steps", type=positive, metavar="T", help="outer steps in all (default: as in CONFIG)")
    parser.add_argument("--min-replicas", type=positive, metavar="M", help="offers that every outer step needs")


def _add_place_options(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where replicas run (default: this machine, or as the run had it)")
    executor = where.add_argument("--executor", metavar="NAME", help=f"{', '.join(EXECUTORS)}: all replicas there")
    places = where.add_argument(
        "--place", action="append", type=place, metavar="NAME[:N[:GPU]]", dest="places",
        help="N replicas there, e.g. --place modal:2:H100,A100 --place local; the last one takes the rest",
    )  # fmt: skip
    for action in (executor, places):
        _set_completion(action, *EXECUTORS)
    where.add_argument("--gpu", action="append", metavar="KIND", help="again for a second choice; in NAME's words")
    where.add_argument(
        "--secret", action="append", metavar="NAME", dest="secrets", help="a secret that replicas get, or PLACE.NAME"
    )
    where.add_argument("--timeout", type=duration, metavar="TIME", help="of one replica's life: 6h, 90m (it restarts)")
    where.add_argument("--pip", action="append", metavar="PACKAGE", help="what a reward of yours needs there")
    where.add_argument("--option", action="append", type=option, metavar="KEY=VALUE", help="partition=gpu, region=eu")


def _add_budget_options(parser: argparse.ArgumentParser) -> None:
    money = parser.add_argument_group("what it may cost (the run ends by itself before; 0: no limit)")
    money.add_argument("--max-usd", type=amount, metavar="X", help="US dollars, since the run began")
    money.add_argument("--max-hours", type=amount, metavar="H", help="hours with any replica running")
    money.add_argument("--no-lease", action="store_true", help="rented replicas go on for ever without a supervisor")
    money.add_argument("--allow-unknown-price", action="store_true", default=None, help="where no price is known")


def _add_looking_verbs(verbs: Any) -> None:
    run = ("RUN", "")
    _add_verb(verbs, "status", "what a run is doing", run)
    _add_watch(verbs)
    which = ("SLOT", "r00 (its newest launch), r00-1 (one session, dead or alive), or supervisor")
    logs = _add_verb(verbs, "logs", "what a replica prints", run, which)
    _set_completion(logs._actions[2], SLOTS)
    logs._actions[2].nargs = "?"  # without one, the run's slots are named
    logs._actions[2].default = ""
    logs.add_argument("--follow", "-f", action="store_true", help="and what comes, until it ends")
    logs.add_argument("--tail", type=natural, metavar="N", help="the last N lines only")
    _add_verb(verbs, "costs", "what a run has cost so far, by replica and place", run)


def _add_watch(verbs: Any) -> None:
    text = "what it is doing, as it goes on: curves, sessions, events; keys for logs and rollouts"
    watch = _add_verb(verbs, "watch", text, ("RUN", ""))
    watch.add_argument("--web", action="store_true", help="as a page in your browser")
    watch.add_argument("--port", type=port, metavar="P", help="of --web: default 8642, else a free one; 0: a free one")
    watch.add_argument(
        "--bind", default="127.0.0.1", metavar="HOST", help="of --web: elsewhere its address has a token"
    )
    watch.add_argument("--publish", action="store_true", help="write the page into the bucket, again and again")


def _add_changing_verbs(verbs: Any) -> None:
    run = ("RUN", "")
    scale = _add_verb(verbs, "scale", "keep another number of replicas from now on", run)
    scale.add_argument("replicas", type=positive, metavar="N")
    scale.add_argument("--min-replicas", type=positive, metavar="M", help="offers that every outer step needs")
    scale.add_argument("--yes", "-y", action="store_true", help="do not ask whether the price is right")
    drain = _add_verb(
        verbs, "drain", "let one replica finish its round and leave (`scale` and `resume` undo it)", run, ("SLOT", "")
    )
    _set_completion(drain._actions[2], SLOTS)
    stop = _add_verb(verbs, "stop", "end every replica of a run, and prove it", run)
    stop._actions[1].nargs = "?"
    _set_completion(
        stop.add_argument("--executor", metavar="NAME", help="with --all, in RUN's place: what lives on this platform"),
        *EXECUTORS,
    )
    stop.add_argument("--all", action="store_true", help="of any run, also what no run knows of; asks first")
    stop.add_argument("--yes", "-y", action="store_true", help="with --all: do not ask")
    stop.add_argument(
        "--grace", type=seconds, metavar="S", help="seconds before a kill (default: 20, and three inner steps)"
    )
    stop.add_argument("--purge", action="store_true", help="and remove what platforms keep of it; never the run itself")


def _add_writing_verbs(verbs: Any) -> None:
    run = ("RUN", "")
    export = _add_verb(verbs, "export", "write a step's model as a from_pretrained folder", run)
    export.add_argument("--step", type=int, metavar="T", help="after T outer steps (default: the newest)")
    export.add_argument("--best", action="store_true", help="the step with the highest reward on held-out prompts")
    export.add_argument("--to", required=True, metavar="DIR")
    export.add_argument("--merge", action="store_true", help="of a LoRA run: the whole model, not the adapter alone")
    verify = _add_verb(verbs, "verify", "compute a run again from its bucket, and say what differs", run)
    verify.add_argument(
        "--step", type=step_or_all, metavar="T", help="only θ after T outer steps (default: all that is kept)"
    )
    both = (("OLD", ""), ("NEW", ""))
    _add_verb(verbs, "diff", "say which settings differ between two runs; their curves side by side", *both)
    explain = _add_verb(verbs, "explain", "one outer step in words: who offered what, why it closed, what it did", run)
    explain.add_argument("--step", type=natural, required=True, metavar="T", help="the outer step after θ_T")
    _add_blame_verbs(verbs)
    evaluate = _add_verb(verbs, "eval", "the reward of a step's model on held-out prompts, on this machine", run)
    evaluate.add_argument("--step", type=int, metavar="T", help="after T outer steps (default: the newest)")
    evaluate.add_argument("--prompts", metavar="FILE", help="a file of prompts (default: that of the run's [eval])")
    evaluate.add_argument(
        "--samples", type=natural, metavar="N", help="completions per prompt at the run's temperature"
    )
    report = _add_verb(verbs, "report", "the run as a page in one file, report.html", run)
    report.add_argument("--to", metavar="DIR", help="where to (default: the run's folder; here, for a bucket)")
    report.add_argument("--publish", action="store_true", help="and write the page into the bucket, below page/")
    report.add_argument("--png", action="store_true", help="and report.png, a picture of it")
    traces = _add_verb(
        verbs, "traces", "freeze the rollouts in its log as states, to ask teachers about (docs/replay.md)", run
    )
    traces.add_argument("--to", required=True, metavar="FILE")
    _add_track(verbs)


def _add_track(verbs: Any) -> None:
    text = "write a run's curves to a tracker; its bucket is only read"
    track = _add_verb(verbs, "track", text, ("RUN", ""))
    to = track.add_argument("--to", action="append", required=True, choices=TRACKERS, help="again for another one")
    _set_completion(to, *TRACKERS)
    track.add_argument("--follow", "-f", action="store_true", help="and what comes, until the run is done")
    track.add_argument(
        "--samples", type=natural, default=SAMPLES, metavar="N", help=f"completions per outer step (default {SAMPLES})"
    )
    track.add_argument("--project", metavar="NAME", help="in wandb and trackio (default: WANDB_PROJECT, or diloco)")
    track.add_argument("--folder", default=FOLDER, metavar="DIR", help="of TensorBoard's files (default tensorboard)")
    track.add_argument("--parent", default="", help=argparse.SUPPRESS)


def _add_checking_verbs(verbs: Any) -> None:
    text = "can this store carry a run, and what does one sync take and cost"
    doctor = _add_verb(verbs, "doctor", text, ("URL", ""))
    size = doctor.add_mutually_exclusive_group()
    size.add_argument("--parameters", type=count, metavar="N", help="of the model, e.g. 600M or 1.7B")
    size.add_argument("--config", metavar="CONFIG", help="a run.toml: its model, codec and replicas")
    doctor.add_argument("--replicas", type=positive, metavar="N", help="default: as in CONFIG, else 4")
    start = _add_verb(verbs, "init", "a small project that runs as it stands: config, prompts, reward, its test")
    start.add_argument("folder", metavar="FOLDER", help="a new one")
    start.add_argument("--model", default=MODEL, metavar="MODEL", help=f"on the Hub, a folder or .gguf ({MODEL})")
    start.add_argument("--task", default="sums", choices=tuple(TASKS), help="sums (default), or yours: to write over")
    check = _add_verb(
        verbs, "check", "ask the reward about the first prompts; nothing is started", ("CONFIG", "the run.toml")
    )
    check.add_argument("--rows", type=positive, default=3, metavar="N", help="prompts (default 3)")
    check.add_argument(
        "--completion", action="append", default=[], metavar="TEXT", help="score this one too; again for more"
    )
    check.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="in the place of CONFIG's")
    text = "from an account to the command that starts a run: login, store, secret; makes what it may"
    setup = _add_verb(verbs, "setup", text)
    setup.add_argument("place", metavar="PLACE", choices=("modal", "hf"), help="modal or hf")
    setup.add_argument("--run", metavar="URL", help="default: modal://diloco/first, or a bucket of your namespace")
    setup.add_argument(
        "--secret", default="diloco-storage", metavar="NAME", help="Modal's secret with the store's keys"
    )
    setup.add_argument("--yes", "-y", action="store_true", help="make what is missing without asking")
    objectives = _add_verb(verbs, "objectives", "inner.grpo.objective's menu: formulas, knobs, when to use which")
    objectives.add_argument("config", nargs="?", metavar="CONFIG", help="a run.toml: what would be inert there")
    demo = _add_verb(verbs, "demo", "the whole thing on this machine, with a kill -9 on the way")
    demo.add_argument("--run", metavar="DIR", help="default runs/demo; once that is done runs/demo-2, …")
    shell = _add_verb(verbs, "completion", 'tab completion for your shell: eval "$(diloco completion bash)"')
    shell.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    shell.add_argument("--verb", default="", help="for whose sake (`logs` knows sessions, such as r01-2, too)")
    shell.add_argument("--slots", metavar="RUN", help="only name the slots of a run, one a line (the scripts ask this)")


def _add_blame_verbs(verbs: Any) -> None:
    run = ("RUN", "")
    blame = _add_verb(verbs, "blame", "whose pseudogradients moved a number most: θ again without each replica", run)
    bisect = _add_verb(verbs, "bisect", "since which outer step: a binary search, with a command as the judge", run)
    for parser in (blame, bisect):
        parser.usage = f"diloco {parser.prog.split()[-1]} RUN [options] [-- COMMAND …]"
        parser.add_argument("--from", dest="first", type=natural, metavar="A", help="from θ_A on (default: the oldest)")
        parser.add_argument("--to", dest="last", type=natural, metavar="B", help="up to θ_B (default: the newest)")
        parser.add_argument(
            "--merge", action="store_true", help="COMMAND gets whole models of a LoRA run, not adapters"
        )
    blame.add_argument(
        "--by", choices=("replica", "step"), default="replica", help="what is left out (default: replica)"
    )
    blame.add_argument("--text", metavar="FILE", help="judge by the loss on this text")
    blame.add_argument(
        "--prompts", metavar="FILE", help="judge by the reward on these prompts (default: the run's [eval])"
    )
    gc = _add_verb(verbs, "gc", "delete what a run needs no more, beyond a size", run)
    gc.add_argument("--keep", required=True, metavar="SIZE", help='"5 GB"; "window": only what a replica may need')
    gc.add_argument("--dry-run", action="store_true", help="only say what would go")
    gc.add_argument("--yes", "-y", action="store_true", help="do not ask")
    blame.add_argument("--no-metric", action="store_true", help="only lengths and cosines; nothing is loaded")


class Version(argparse.Action):
    """`diloco --version`; the release is looked up only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            release = metadata.version("serverless-diloco")
        except metadata.PackageNotFoundError:
            release = "(not installed as a package)"
        print(f"diloco {release}, Python {sys.version.split()[0]}")
        parser.exit()


def _set_completion(action: argparse.Action, *words: str) -> None:
    """Set the values that TAB offers for an option."""
    action.offered = words  # type: ignore[attr-defined]


# -------------------------------------------------------------------- what a word must look like


def step_or_all(text: str) -> int | None:
    """ "all" -> None"""
    return None if text == "all" else natural(text)


def positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        advice = "; to end a run: diloco stop RUN" if text == "0" else ""
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1{advice}")
    return number


def port(text: str) -> int:
    number = natural(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: 0 to 65535")
    return number


def natural(text: str) -> int:
    return 0 if text == "0" else positive(text)


def amount(text: str) -> float:
    """ "12.50", "$12.50" """
    if not re.fullmatch(r"\$?\d+(\.\d*)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no amount; write e.g. 25 or 12.50 (0: no limit)")
    return float(text.removeprefix("$"))


def duration(text: str) -> float:
    """ "90m" -> 5400.0"""
    found = re.fullmatch(r"(\d+(?:\.\d*)?)([smhd]?)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write e.g. 90m, 6h or 1d")
    return float(found[1]) * UNITS_S[found[2]]


def seconds(text: str) -> float:
    """ "20", "0.5" -> a number of seconds that can be waited for"""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds; write e.g. 20 (0: kill at once)")
    return number


def option(text: str) -> tuple[str, Any]:
    """ "cpu=4" -> ("cpu", 4);  a value that is no JSON is a text"""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r} must look like KEY=VALUE, e.g. partition=gpu")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def place(text: str) -> dict[str, Any]:
    """ "modal:2:H100,A100" -> a place as it stands in the run (executors/platforms/multi.py)"""
    name, _, rest = text.partition(":")
    number, _, gpus = rest.partition(":")
    if not name or (number and not re.fullmatch(r"[1-9]\d*", number)):
        raise argparse.ArgumentTypeError(f"{text!r} must look like NAME, NAME:2 or NAME:2:H100,A100")
    found: dict[str, Any] = {"executor": name}
    if number:
        found["count"] = int(number)
    if gpus:
        found["gpu"] = [g for g in gpus.split(",") if g]
    return found


def count(text: str) -> int:
    """ "1.7B" -> 1_700_000_000"""
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = 0.0
    if not 1 <= number < 1e15:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of parameters; write e.g. 50000000, 50M or 1.7B")
    return round(number)
