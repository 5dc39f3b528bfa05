"""The way in which a replica's ranks learn which script to run, and the store where the script's ranks meet.

    rank 0   script ─▶ a file beside MEET's ─▶ rank 1 …   each runs the script, in the same folder
             a store at MASTER_ADDR:MASTER_PORT ◀── dist.init_process_group(), as under torchrun

The script makes torch's default group, with its own backend and timeout; our group is a part of it (outer/ranks/).
If the script makes no group, DiLoCoCallback, or `lead`, makes it.  Rank 0 keeps the store's port open from the start,
so that no other process takes it, as torchrun's agent does; a variable of torchrun tells torch to use that store.

Not promised: a script that opens MASTER_PORT itself; such a script fails under torchrun, too.
"""

import os
import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco.process import exitcodes
from diloco.process.ranks import MEET, SETTLE_S
from diloco.run.script import REPLICAS, SLOT, URL, Script

VARIABLES = (URL, SLOT, REPLICAS)
ADDRESS = "127.0.0.1"
TOLD = "script"  # the file with the ScriptJob, beside the file of MEET
POLL_S = 0.1

_stores: list[Any] = []  # open to the end of this process


@dataclass(frozen=True)
class ScriptJob:
    """The script that rank 0 runs, in the same folder, with the same variables."""

    script: Script
    folder: Path
    variables: Mapping[str, str]


def tell_script(script: Script, folder: Path) -> None:
    """Let the other ranks run the script; set the variables by which its ranks find each other, on all ranks."""
    variables = {name: os.environ[name] for name in VARIABLES} | open_store()
    os.environ.update(variables)
    told = Path(os.environ[MEET]).with_name(TOLD)
    unfinished = told.with_suffix(".part")
    unfinished.write_bytes(pickle.dumps(ScriptJob(script, folder, variables)))
    unfinished.replace(told)


def open_store() -> dict[str, str]:
    """Open the store where a script's ranks meet. Return the variables that name it, as torchrun sets them."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(ADDRESS, 0, is_master=True, wait_for_workers=False)
    _stores.append(store)
    return {"MASTER_ADDR": ADDRESS, "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def told_script() -> ScriptJob | None:
    """Wait for rank 0's message. Return the script that it runs, or None if it begins the ranks' group itself."""
    meet = Path(os.environ[MEET])
    told = meet.with_name(TOLD)
    while not (told.exists() or meet.exists()):
        time.sleep(POLL_S)
    return pickle.loads(told.read_bytes()) if told.exists() else None


def follow_script(job: ScriptJob) -> int:
    """Run the script as a rank beside rank 0. Return the exit code."""
    from diloco.outer.ranks.group import refuse_missing_gpu
    from diloco.script.process import start

    os.environ.update(job.variables)
    refuse_missing_gpu(int(os.environ["LOCAL_RANK"]))
    try:
        start(job.script, job.folder)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code == exitcodes.LEFT:
            return exitcodes.DONE  # rank 0 leaves the run for all ranks, and may end later than they
        time.sleep(2 * SETTLE_S)  # rank 0 runs the same script, and reports the error
        if isinstance(error, SystemExit) and error.code:  # scripts and replicas have different exit codes
            raise RuntimeError(f"{job.script} ended with sys.exit({error.code!r})") from None
        raise
    return exitcodes.DONE
