"""The parts of every verb: its parser, its act, its options.

    add_run_verb(verbs, "logs", "what a replica prints", _logs) ──▶ RUN, --json, args.act = _logs
    args.run    RUN: an existing run            args.url    --run URL: a run to create or resume

Not promised: checks of a word's form (typed.py), or that a named thing exists: the act checks that.
"""

import argparse
from functools import partial
from typing import TYPE_CHECKING, Any

from executors.cli.answers import Act, say

if TYPE_CHECKING:
    from diloco.run.config import RunConfig

EXIT_CODES = "exit codes: 0 done, 1 failed, 2 a mistake, 75 no answer: repeat it later; `diloco --help` lists all"


def add_verb(verbs: Any, name: str, text: str, act: Act) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text, epilog=EXIT_CODES)
    parser.set_defaults(act=act)
    flag(parser, "--json", help="for programs: JSON on stdout, words on stderr")
    return parser


def _read_typed(name: str, text: str) -> Any:
    """Convert an option's text.   name: the name of a converter in executors/cli/typed.py."""
    from executors.cli import typed

    return getattr(typed, name)(text)


def add_run_verb(verbs: Any, name: str, text: str, act: Act) -> argparse.ArgumentParser:
    parser = add_verb(verbs, name, text, act)
    parser.add_argument("run", metavar="RUN", help="the run's folder or bucket: runs/mine, s3://…")
    return parser


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add CONFIG, and --set, which replaces single settings."""
    parser.add_argument("config", metavar="CONFIG", help="the run.toml")
    again(parser, "--set", default=[], metavar="NAME=VALUE", help="override a setting of CONFIG, e.g. inner.lr=2e-6")


def read_config(args: argparse.Namespace) -> "RunConfig":
    """Read the config, and gather its data on this machine: fetch data from the Hub, join several files into one."""
    from diloco.run.config import load_config

    config = load_config(args.config, args.set)
    if config.eval is None and not (config.inner.named_files or config.inner.rewards.models):
        return config
    from diloco.run.data_files import gather_data

    return gather_data(config, say)


def flag(parser: Any, *names: str, help: str, **more: Any) -> None:
    parser.add_argument(*names, action="store_true", help=help, **more)


class Once(argparse.Action):
    """The action of an option with one value: refuses a second value, and an empty value, as "$UNSET" gives."""

    given = False

    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        if self.given or (self.option_strings and values == ""):
            said = f"given twice, the second time with {values!r}; leave one out"
            raise argparse.ArgumentError(self, said if self.given else "the value is empty; is a shell variable unset?")
        self.given = True
        setattr(namespace, self.dest, values)


def value(parser: Any, name: str, metavar: str, help: str, type: Any = None, **more: Any) -> argparse.Action:
    type = "local_path" if metavar in ("DIR", "FOLDER") else type
    more["type"] = partial(_read_typed, type) if isinstance(type, str) else type
    return parser.add_argument(name, action=Once, metavar=metavar, help=help, **more)


def again(parser: Any, *names: str, type: str = "word", **more: Any) -> argparse.Action:
    """Add an option that may be given more than once; its value is a list."""
    return parser.add_argument(*names, action="append", type=partial(_read_typed, type), **more)


SLOTS = "{slots of the run}"  # a placeholder; completion.py replaces it by the run's slots


def offer(action: argparse.Action, *words: str) -> None:
    """Set the values that TAB offers for an option."""
    action.offered = words  # type: ignore[attr-defined]
