"""`diloco watch`: shows a run while it runs.

    a terminal            executors/cli/watch/app.py: header, sessions, curves, events, keys
    not a terminal        one line per outer step and event; --json: the same as JSON
    textual is missing    a line that says how to install it

Only the keys d and s write to the run, so the command may be killed and started again.

Not promised: a picture that is newer than its bucket; stale data are marked with their age.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

from diloco.run.config import ConfigError
from diloco.runlog.opening import open_view
from diloco.runlog.scope import COSTS
from executors.cli.looking.lines import Lines, key_values
from executors.cli.opening import ask_again
from executors.cli.watch.looks import RunLooks, error_words
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError


def watch(url: str, clock: Clock, *, as_json: bool, out: TextIO) -> int:
    """Show the run while it runs; return the exit code.

    Raise ConfigError if there is no run, or if the package for the terminal is missing.
    """
    is_terminal = out.isatty() and sys.stdin.isatty() and not as_json and os.environ.get("TERM") != "dumb"
    if is_terminal:
        check_textual()
    print(f"opening {url}", file=sys.stderr, flush=True)
    looks = RunLooks(ask_again(lambda: open_view(url, COSTS), clock), clock)
    if not is_terminal:
        return write_lines(looks, out, json.dumps if as_json else key_values)
    looks.begin()
    from executors.cli.watch.app import run_app

    return run_app(looks)


def check_textual() -> None:
    try:
        import textual  # noqa: F401
    except ImportError:
        raise ConfigError(
            "`diloco watch` draws with textual, which is not installed: pip install 'serverless-diloco[watch]' "
            "(without it: diloco watch RUN | cat, one line per outer step; or diloco status RUN)"
        ) from None


def write_lines(looks: RunLooks, out: TextIO, form: Callable[[dict[str, Any]], str]) -> int:
    """Write one line per outer step and event, and per new trouble of a look, until the run is done or stopped."""
    lines, said = Lines(out, form), ""
    while True:
        try:
            picture, said = looks.next_picture(), ""
        except (RendezvousError, OSError) as error:
            picture, words = None, f"no answer, asking again: {error_words(error)}"
            if words != said:  # write the error at once: perhaps no picture follows
                lines.write({"note": words})
            said = words
        if picture is not None and not picture.partial and looks.report is not None:
            lines.show(looks.report)
            if picture.seen.state in ("done", "stopped"):
                return 0
        looks.clock.sleep(looks.pause_s)
