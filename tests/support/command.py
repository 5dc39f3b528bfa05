"""The verbs of `diloco`, as its parser has them, and what a start would ask for with some options."""

import argparse

from executors.cli.main import make_parser
from executors.cli.starting.verbs import request_of
from executors.preflight.quote import StartRequest


def verbs() -> dict[str, argparse.ArgumentParser]:
    (found,) = [a.choices for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return found


def asked(*argv: str) -> StartRequest:
    """The request of a command: asked("resume", "r", "--timeout", "2h")."""
    return request_of(make_parser().parse_args([*argv]), "r")
