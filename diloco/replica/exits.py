"""Takes an exit or an interrupt that the user's code raises for an error of this session.

    sys.exit(2) in an environment's reset ──▶ SystemExit(2) ──▶ RuntimeError: the session crashes, and starts again

Without this, the code of that exit would be the replica's own: 2 would end the whole run as a mistake in its config.
Ctrl-C raises nothing in a replica (diloco/process/signals.py), so a KeyboardInterrupt also comes from the user's code.

Not promised: anything for os._exit, or for a library that ends the process in C.
"""


def as_error(raised: BaseException) -> Exception:
    """Return the exception, or a RuntimeError in place of one outside Exception."""
    if isinstance(raised, Exception):
        return raised
    how = f"called sys.exit({raised.code!r})" if isinstance(raised, SystemExit) else f"raised {type(raised).__name__}"
    error = RuntimeError(f"your code or a library {how}; the traceback in this session's log shows it")
    error.__cause__ = raised
    return error
