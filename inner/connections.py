"""Whether an error of a user's code is a connection's, which no completion can cause.

    raise JudgeDown from httpx.ConnectError ──▶ the error, its cause, its context, … ── one that says ──▶ True | False

    refused, reset, no such host, no route, no certificate, TLS            a connection's
    an answer of 5xx, 401, 402, 403, 408, 409, 425, 429                    the service's, which counts as a connection's
    an answer of another 4xx: this very request was refused                the completion's
    no answer in time after the request was sent, an answer of no use      the completion's, like a hang

Clients of services are known by their modules, so that none of them is imported here.

Not promised: an error of a user's own type that hides what caused it (`raise … from None`).
"""

import errno
import re
import socket
import ssl
from collections.abc import Iterator

_CLIENTS = {
    "httpx", "httpcore", "requests", "urllib3", "urllib", "http", "aiohttp", "websockets", "grpc", "openai",
    "anthropic", "litellm", "botocore", "google", "huggingface_hub",
}  # fmt: skip
_ROUTE = {
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ETIMEDOUT,
    errno.EMFILE, errno.ENFILE,
}  # fmt: skip
_NOT_THE_REQUEST = {401, 402, 403, 408, 409, 425, 429}  # of 4xx
_THE_REQUEST = re.compile(r"(?<!Connect)(?<!Connection)(?<!Pool)Timeout|JSON|Decod|Finish|[Vv]alid")  # clients' names


def is_connection_error(error: BaseException) -> bool:
    """Whether the first error of its chain that says so speaks of a connection or a service."""
    return next((said for one in _chain(error) if (said := _speaks_of_connection(one)) is not None), False)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and the ones behind it, each once."""
    seen = set[int]()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _speaks_of_connection(error: BaseException) -> bool | None:
    """Whether the error is one of the connection; None where it says neither."""
    if isinstance(error, ConnectionError | socket.gaierror | ssl.SSLError):
        return True
    if isinstance(error, OSError) and error.errno in _ROUTE:
        return True
    if type(error).__module__.partition(".")[0] not in _CLIENTS:
        return False if isinstance(error, TimeoutError) else None
    if isinstance(status := _status_of(error), int):
        return not 400 <= status < 500 or status in _NOT_THE_REQUEST
    return _THE_REQUEST.search(type(error).__name__) is None


def _status_of(error: BaseException) -> object:
    """The status of an HTTP answer, under the names that clients give it."""
    own = getattr(error, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return own or getattr(getattr(error, "response", None), "status_code", None)
