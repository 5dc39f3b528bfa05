"""A user's script inside a replica's process: its files, its arguments, its end.

    run.json ─▶ files, by digest ─▶ a folder of this session ─▶ `python train.py ARGUMENTS` there, in this process
    DILOCO_RUN, DILOCO_SLOT, DILOCO_REPLICAS ─▶ DiLoCoCallback, or StoreManager ─▶ the slot that is claimed already

    the script ends     all outer steps taken: DONE        asked to go: LEFT        it never joined: a mistake
    the script raises, or exits with a code or a message of its own
                        before any outer step and before it joined: a mistake, for all replicas alike; else a crash

Not promised: that files which the script writes into its folder stay; let it use an absolute path, or export the run.
"""

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from diloco.model.fetch import fetch_stored, save_below
from diloco.process import exitcodes
from diloco.process.session import Session
from diloco.run.config import ConfigError, OuterError
from diloco.run.founding import is_finished
from diloco.run.library import LAUNCHED, one_spelling
from diloco.run.record import Run
from diloco.run.script import FILES, REPLICAS, SLOT, URL, Script
from inner.errors import InnerError
from rendezvous import layout
from rendezvous.agreement.chain import first_open_step
from rendezvous.agreement.membership import read_control
from rendezvous.errors import RendezvousError

NEVER_JOINED = (
    "{script} ended and never joined the run, so nothing was averaged. Give its trainer "
    "callbacks=[DiLoCoCallback()] (from diloco import DiLoCoCallback), or put its loop into `with make_diloco(…)`"
)
ONLY_SENT = "A replica has only the files that `diloco launch` lists behind `sends`; --file adds files and folders"
ENDED_EARLY = (
    "{script} ended after outer step {step} of {steps}, before the run was done. If a callback of its trainer stops "
    "the training, leave the callback out: `diloco stop` ends a run"
)


def run_script(run: Run, session: Session, folder: Path, tell: Callable[[Path], object] | None = None) -> int:
    """Run the script to its end. Return the replica's exit code.   folder: this session's folder, empty.

    tell: called with the folder when its files and the variables are there (diloco/replica/ranks.py).
    Raises ConfigError for a script that cannot run anywhere, and errors of the rendezvous."""
    script = run.config.script
    write_files(run, folder)
    LAUNCHED[one_spelling(run.url)] = session
    os.environ.update({URL: run.url, SLOT: session.rv.slot, REPLICAS: str(run.config.fleet.replicas)})
    if tell is not None:
        tell(folder)
    try:
        start(script, folder)
    except SystemExit as end:
        if end.code and not session.rv.is_leaving:
            return code_of_exit(session, script, end.code)
    except (ConfigError, RendezvousError):
        raise
    except Exception as error:
        if has_joined(session) or _has_begun(session):
            raise
        if isinstance(error, InnerError | OuterError):  # DiLoCoCallback's refusals: the text says all
            raise ConfigError(f"{script}: {error}") from error
        traceback.print_exc()
        lacks = f". {ONLY_SENT}" if isinstance(error, FileNotFoundError | ModuleNotFoundError) else ""
        raise ConfigError(f"{script} raised {type(error).__name__}: {error}{lacks}") from error
    return code_of_end(session, script)


def write_files(run: Run, folder: Path) -> None:
    """Write the script and the files beside it, each checked against run.json."""
    for name, stored in run.record.files.items():
        save_below(folder, name.removeprefix(FILES), fetch_stored(run.store, stored))


def start(script: Script, folder: Path) -> None:
    """Run the script as `python train.py …`, or `python -m module …`, in its folder."""
    os.chdir(folder)
    sys.argv = [script.path, *script.arguments]
    sys.path.insert(0, str(folder if script.is_module else (folder / script.path).parent))
    sys.path.append(str(folder))  # a script in a subfolder may import from the folder where it was launched
    if script.is_module:
        runpy.run_module(script.path, run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(str(folder / script.path), run_name="__main__")


def code_of_exit(session: Session, script: Script, exited: str | int) -> int:
    """Return the exit code for a script that called sys.exit(exited); scripts and replicas have different codes.

    Raises ConfigError before the first outer step, if the script had not joined the run."""
    told = f"{script} ended with sys.exit({exited!r})"
    if not has_joined(session) and not _has_begun(session):
        raise ConfigError(f"{told} before it joined the run. Its last words above say why. {ONLY_SENT}")
    session.emit("crashed", error=told)
    session.flush()
    return exitcodes.CRASHED


def code_of_end(session: Session, script: Script) -> int:
    """Return the exit code for a script that ended by itself.   Raises ConfigError if it never joined the run."""
    store = session.rv.store
    wanted = read_control(store)
    if is_finished(store, wanted):
        return exitcodes.DONE
    if session.rv.is_leaving:
        return exitcodes.LEFT
    if not has_joined(session):
        raise ConfigError(NEVER_JOINED.format(script=script))
    done = first_open_step(store) if wanted.steps else 0
    session.emit("crashed", error=ENDED_EARLY.format(script=script, step=done, steps=wanted.steps))
    session.flush()
    return exitcodes.CRASHED


def _has_begun(session: Session) -> bool:
    """Whether the run's first outer step is committed."""
    return session.rv.store.get(layout.commit_key(0)) is not None


def has_joined(session: Session) -> bool:
    """Whether the script has reached DiLoCoCallback or make_diloco."""
    return session.rv.members.status.phase != "boot"
