"""Explains the error of a failed command: its text, its exit code, and whether a traceback is needed.

    an error ──▶ is_expected ──▶ explain_error ──▶ (text, exit code)        unexpected: Python's traceback

Not promised: that the same command works later; the text says when it may work.
"""

import errno
import os

BUSY = (
    "The bucket is busy or cannot be reached from here. The command itself is right: repeat it later. Running "
    "replicas wait for the bucket, too"
)
CLOSED = (
    "this user may not open {}: permission denied. Use the account that owns it, or let its owner make it readable "
    "(chmod -R a+rX on a run's folder)"
)
FORBIDDEN = (
    "{}: operation not permitted. This machine forbids it to every account, by its file system (the file is immutable, "
    "or the mount lacks this right), by a sandbox or by a privacy setting. Change that, or use another folder"
)
AWAY = (
    "the file system of {} gives no answer: {}. A mount may be lost: look at it (`mount`), and mount it again. Then "
    "repeat the command"
)
NO_ANSWER = {errno.ENOTCONN, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.ECONNABORTED}
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN}  # this process or machine is at a limit
HOMELESS = "Could not determine home directory."  # the words of Path.home()
NO_HOME = (
    "this account (uid {}) has no home folder, and HOME is not set. Set HOME to a folder that the account may write "
    '(HOME="$PWD"), then repeat the command'
)
LOST = (
    "no space left for the output of this command (stdout). Free some space there, or redirect the output; then repeat "
    "the command"
)


def is_expected(error: Exception) -> bool:
    """Whether the error says what to do next; any other error is a defect, and keeps its traceback."""
    from diloco.process.disk import is_full
    from diloco.run.config import ConfigError
    from diloco.views.page.charts import ReportError
    from executors.platforms.base import ExecutorError
    from executors.preflight.run_url import UsageError
    from inner import InnerError
    from rendezvous.errors import RendezvousError

    known = ConfigError | InnerError | RendezvousError | OSError | UsageError | ReportError | ExecutorError
    return isinstance(error, known) or is_full(error) or str(error) == HOMELESS


def explain_error(error: Exception) -> tuple[str, int]:
    """Return (text, exit code).  A platform without an answer and a full disk are not mistakes in the command: the exit
    code tells that the same command may work later."""
    from diloco.process import exitcodes
    from diloco.process.disk import is_full
    from diloco.views.trackers.tracker import TrackerBusy
    from executors.platforms.base import Unavailable
    from rendezvous.errors import GaveUp, StoreFull, StoreGone, StoreUnclear

    if isinstance(error, StoreUnclear | GaveUp):  # a GaveUp's text says what to do
        return f"{error}. {BUSY}" if isinstance(error, StoreUnclear) else str(error), exitcodes.GAVE_UP
    if isinstance(error, StoreFull):
        return f"{error}, then repeat the command", exitcodes.GAVE_UP
    if is_full(error) and getattr(error, "filename", "") == "<stdout>":
        return LOST, exitcodes.GAVE_UP
    if is_full(error):
        full = f"no space left on this machine's disk for the command's files{_where(error)}"
        return f"{full}; free some space, then repeat the command", exitcodes.GAVE_UP
    if isinstance(error, OSError) and error.errno in NO_ANSWER and error.filename:
        return AWAY.format(error.filename, error.strerror), exitcodes.GAVE_UP
    if isinstance(error, OSError) and error.errno in NO_ROOM:
        limit = "Raise the limit of this shell (`ulimit -n 4096` for open files), or end other processes"
        return f"{error.strerror}{_where(error)}. {limit}; then repeat the command", exitcodes.GAVE_UP
    if isinstance(error, OSError) and error.errno == errno.EROFS and error.filename:
        return f"{error.filename} is on a read-only file system. Name a place that can be written", exitcodes.USER_ERROR
    if str(error) == HOMELESS:
        return NO_HOME.format(os.getuid()), exitcodes.USER_ERROR
    if isinstance(error, PermissionError) and error.filename:
        words = FORBIDDEN if error.errno == errno.EPERM else CLOSED
        return words.format(error.filename), exitcodes.USER_ERROR
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}. Correct this path, or name another one", exitcodes.USER_ERROR
    later = isinstance(error, Unavailable | TrackerBusy | StoreGone)
    return str(error), exitcodes.GAVE_UP if later else exitcodes.USER_ERROR


def _where(error: Exception) -> str:
    """Return " (FOLDER)" if the error names its file, or the folders that tempfile tried; else ""."""
    name = getattr(error, "filename", None)
    tried = str(getattr(error, "strerror", "")).partition("[")[2].rstrip("]")
    where = os.path.dirname(name) if isinstance(name, str) else tried
    return f" ({where})" if where else ""
