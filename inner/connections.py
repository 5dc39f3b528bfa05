"""Decide whether a connection or service, not a completion, caused an error of the user's code.

    raise JudgeDown from httpx.ConnectError ──▶ the error, its cause, its context, … ── first clear error ─▶ True, False

    refused, reset, no such host, no route, no certificate, TLS            the connection
    a response of 5xx, 401, 402, 403, 408, 409, 425, 429                   the service; counts as the connection
    another 4xx response: the service rejected this request's content      the completion
    no response in time after the request was sent; a useless response     the completion, like a hang

Clients' errors are recognised by their modules' names, so no client is imported here.

Not promised: to find a cause that the user's error hides (`raise … from None`).
"""

import errno
import re
import socket
import ssl
from collections.abc import Iterator

_CLIENTS = {
    "httpx", "httpcore", "httpx2", "httpcore2", "requests", "urllib3", "urllib", "http", "aiohttp", "websockets",
    "grpc", "openai", "anthropic", "litellm", "botocore", "google", "huggingface_hub",
}  # fmt: skip
_ROUTE = {
    errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ENETDOWN, errno.EADDRNOTAVAIL, errno.ENOBUFS, errno.ETIMEDOUT,
    errno.EMFILE, errno.ENFILE,
}  # fmt: skip
_NOT_THE_REQUEST = {401, 402, 403, 408, 409, 425, 429}  # 4xx codes that do not concern the request's content
_THE_REQUEST = re.compile(r"(?<!Connect)(?<!Connection)(?<!Pool)Timeout|JSON|Decod|Finish|[Vv]alid")  # class names


def is_connection_error(error: BaseException) -> bool:
    """Whether a connection or a service caused the error. The first clear error of its chain decides."""
    return next((said for one in _chain(error) if (said := _speaks_of_connection(one)) is not None), False)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, each once."""
    seen = set[int]()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _speaks_of_connection(error: BaseException) -> bool | None:
    """Whether this one error comes from a connection or service; None if unclear."""
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
    """Return the HTTP status of the error's response, under any client's name for it."""
    own = getattr(error, "status_code", None) or getattr(error, "status", None) or getattr(error, "code", None)
    return own or getattr(getattr(error, "response", None), "status_code", None)
