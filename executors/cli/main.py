"""The command `diloco`: its verbs, and clear messages for errors.

    diloco VERB …  ──make_parser──▶  args  ──▶  args.act(args)  ──▶  Answer  ──▶  exit code
             └─ VERBS: starting looking changing writing checking: verbs.py of each has options and acts

A command imports only the module of its verb's kind, and further modules when they are used, so it answers at once.

Not promised: stable texts for people; programs read --json.
"""

import os
import sys
from argparse import SUPPRESS, ArgumentParser, Namespace, RawDescriptionHelpFormatter, _SubParsersAction
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from diloco.process.output import open_streams, print_plainly, survive_lost_output
from executors.cli.answers import Answer, print_answer
from executors.cli.opening import ask_again
from rendezvous.clock import SystemClock

VERBS = {  # kind -> its verbs: executors/cli/KIND/verbs.py
    "starting": ("train", "launch", "plan", "resume", "demo"),
    "looking": ("status", "watch", "logs", "costs", "report", "diff"),
    "changing": ("scale", "drain", "stop"),
    "writing": ("export", "verify", "explain", "blame", "bisect", "gc", "eval", "traces", "reward", "track"),
    "checking": ("init", "check", "doctor", "setup", "objectives", "completion"),
}
WHOLE = ("completion",)  # verbs that need the parsers of all others
WITH_COMMAND = ("bisect", "blame")


def main(argv: list[str] | None = None) -> int:
    open_streams()
    if os.environ.get("PYTHONOPTIMIZE", "0") not in "01":
        os.environ["PYTHONOPTIMIZE"] = "1"  # for children: transformers reads docstrings, which -OO takes out
    if any(name.lower().endswith("_proxy") for name in os.environ):
        import_module("diloco.process.loopback").pass_the_proxy(os.environ)
    words, command = split_command(sys.argv[1:] if argv is None else argv)
    survive_lost_output("stderr")  # the exit code, which programs read, stays the same
    try:
        try:
            args = make_parser(words).parse_args(words)
        except OSError as error:  # of a help text
            error.filename = "<stdout>"
            raise
        finally:  # also after a help text
            print_plainly()
            sys.stdout.flush()
        args.judge = command
        if args.command == "stop":
            survive_lost_output()  # a closed pipe (`| head -1`) must not leave rented machines running
        code = print_answer(_short_form(args) or args.act(args), args.json)
        sys.stdout.flush()  # here, where we can report a full disk
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `diloco status RUN | head`: the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from executors.cli.failures import explain_error, is_expected

        if os.environ.get("DILOCO_DEBUG") or not is_expected(error):
            raise
        if getattr(error, "filename", None) == "<stdout>":  # drop the rest of the text
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        text, code = explain_error(error)
        print(f"diloco {words[0] if words else '--help'}: {text}", file=sys.stderr)
        return code


def split_command(argv: Iterable[str]) -> tuple[list[str], list[str]]:
    """Split off a command behind `--`, which argparse would parse as its own arguments.

    ("bisect", "RUN", "--", "cmd", "-x") -> (["bisect", "RUN"], ["cmd", "-x"])"""
    words = [*argv]
    at = words.index("--") if "--" in words and words[0] in WITH_COMMAND else len(words)
    return words[:at], words[at + 1 :]


def _short_form(args: Namespace) -> Answer | None:
    """Return the answer for a run of `launch_replicas`, which has no records; None for any other run."""
    if not getattr(args, "run", None):
        return None
    from executors.cli.looking.short_runs import short_answer, short_run

    run = ask_again(lambda: short_run(args.run, SystemClock()))
    more = {"grace_s": args.grace, "purge": args.purge} if args.command == "stop" else {}
    return None if run is None else short_answer(run, args.command, **more)


# -------------------------------------------------------------------- the grammar


class Parser(ArgumentParser):
    """argparse's parser, without a usage text before each error."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        if args and "--run" not in (verb := self._verb_parser(args[0]))._option_string_actions:
            from executors.preflight.mistyped import run_first

            args = run_first(args, [action.dest for action in verb._get_positional_actions()])
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from executors.preflight.mistyped import unknown_words

            verb = self._verb_parser(getattr(found, "command", ""))
            verb.error(unknown_words(unknown, verb._option_string_actions))
        return found

    def error(self, message: str) -> NoReturn:
        """Print the message; raise SystemExit(2)."""
        from executors.preflight.mistyped import in_words

        self.exit(2, f"{self.prog}: {in_words(message, self.prog)}\n")

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse would drop an OSError, and a help text on a full disk end with 0

    def _verb_parser(self, name: str) -> "Parser":
        choices = [a.choices for a in self._actions if isinstance(a, _SubParsersAction)]
        return next((c[name] for c in choices if name in c), self)


def make_parser(words: Sequence[str] = ()) -> ArgumentParser:
    """Make the parser of all verbs; if the first of `words` is a verb, only of its kind."""
    kinds = [kind for kind, names in VERBS.items() if words and words[0] in names and words[0] not in WHOLE]
    parser = Parser(prog="diloco", formatter_class=RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="command", metavar="VERB", required=True, help=SUPPRESS, prog="diloco")
    for kind in kinds or VERBS:
        import_module(f"executors.cli.{kind}.verbs").add_verbs(verbs)
    parser.usage = "diloco VERB …        `diloco VERB --help` explains one verb"
    if not kinds:
        from executors.cli.overview import EXIT_CODES, Version, verbs_in_groups

        parser.add_argument("--version", action=Version, nargs=0, help="print the release")
        parser.description = verbs_in_groups({choice.dest: choice.help or "" for choice in verbs._choices_actions})
        parser.epilog = EXIT_CODES
    return parser


if __name__ == "__main__":
    sys.exit(main())
