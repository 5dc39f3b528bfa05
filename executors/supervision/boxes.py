"""Stops the remaining boxes of a run, and reports how many still remain.

    run.json: inner.sampling.boxes, nonce ──▶ python -m inner.extras.boxes.sweep ──▶ "0 boxes left" or what to do
                                              a separate process: we import no provider's package, and cannot hang

Not promised: boxes of the provider "local" on other machines (only their folders are left once the replica has ended);
boxes of a replica that still runs, because it starts new ones.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

from diloco.run.record import Run
from inner.usercode.rehearse import python_path
from rendezvous.background import Emit

MODULE = "inner.extras.boxes.sweep"
ANSWER_S = 300.0


@dataclass(frozen=True)
class Swept:
    """The result of a sweep.   none_left: it is proven that no box is left."""

    none_left: bool
    text: str


def sweep_boxes(run: Run) -> Swept:
    """Stop the boxes of a run whose config names a provider."""
    provider = str(run.config.inner.sampling.boxes)
    command = [sys.executable, "-P", "-m", MODULE, provider, run.record.nonce]
    found = _ask(command)
    if found.get("left") == 0:
        where = " on this machine" if provider == "local" else f" on {provider}"
        own = run.config.inner.sampling.environment is not None and provider != "local"
        elsewhere = ". If options in your environment file put boxes elsewhere, look for them there, too" if own else ""
        return Swept(True, f"0 boxes left{where}, {found['stopped']} stopped{elsewhere}")
    words = str(found.get("trouble") or f"{found.get('left')} boxes left").rstrip(".")
    console = "" if provider == "local" else f", or look at {provider}'s console"
    return Swept(False, f"{words}. Try again: `python {' '.join(command[2:])}`{console}")


def sweep_and_report(run: Run, emit: Emit) -> None:
    """Stop the boxes of an ended run, and log the result."""
    if (swept := sweep_boxes(run)).none_left:
        return emit("boxes_swept", text=swept.text)
    emit("warning", kind="boxes", text=swept.text)


def _ask(command: list[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ANSWER_S,
            env={**os.environ, "PYTHONPATH": python_path()},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"trouble": f"the provider of boxes gave no answer within {ANSWER_S:.0f} s"}
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        return {"trouble": f"the search for boxes ended with code {done.returncode}: {done.stderr.strip()[-300:]}"}
