"""Reports a run's troubles to a webhook (`--alert URL`): once when a trouble begins, and once when it is over.

    every CHECK_S   all_troubles ─▶ changes(open, found) ─▶ log: trouble | trouble_over ─▶ queue
    a thread        queue ─▶ POST, at most LIMIT_S ─▶ again after 2, 10, 30 s ─▶ log: alerted | alert_failed
    a new supervisor learns from these events the open troubles and the undelivered messages (decision 050)

    {"text": "diloco mine: stalled: no outer step for …", "kind": …, "slot": …, "step": …, "advice": …, "page": …,
     "state": "begun" | "over", "run": "mine", "id": …, "at": …, "seen": "no outer step for …"}

The supervisor waits for answers only at its end, for CLOSE_S.  The URL may be a secret: logs and errors show only its
host, and we follow no redirect, which would show the URL to another host.

Not promised: that each message is sent only once: a supervisor may be killed between an answer and its log line.  A
repeated message has the same `id` and `state`.
"""

import json
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from diloco.runlog.reader import SUPERVISOR, Report
from diloco.views.troubles import Trouble
from executors.supervision.notices import VARIABLE
from executors.supervision.notices.messages import all_troubles
from inner.network import network_words
from rendezvous.clock import Clock

CHECK_S = 5.0
LIMIT_S = 10.0  # time limit of one request, in seconds
PAUSES_S = (2.0, 10.0, 30.0)  # seconds before the second, third and fourth request for a message
CLOSE_S = 5.0
BEGUN, OVER = "trouble", "trouble_over"
WORDS = ("kind", "slot", "text", "advice", "page", "id", "state")  # a message's fields; incomplete events are ignored
UNTOLD = ("alerts_failed",)  # troubles of the webhook itself, which no alert can report
Emit = Callable[..., None]


class NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        """Refuse the redirect: None makes urllib raise the answer as an error."""


def host_of(url: str) -> str:
    """Return the host of the URL, which may be shown.  Raise ValueError (without the URL) if it is not a URL."""
    try:
        parts = urlsplit(url)
        host, scheme = parts.hostname, parts.scheme
        _ = parts.port  # raises if the port is not a number
    except ValueError:
        host, scheme = None, ""
    if not host or scheme not in ("http", "https") or not url.isprintable() or " " in url:
        raise ValueError(
            f"--alert (or {VARIABLE}) is not the address of a webhook. Write the whole of it: https://HOST/PATH"
        )
    return host


def post(url: str, body: bytes) -> str:
    """Post the body; return "" if the server accepted it, else the reason, which never contains the URL."""
    request = Request(url, body, {"Content-Type": "application/json", "User-Agent": "diloco"}, method="POST")
    try:
        with build_opener(NoRedirect).open(request, timeout=LIMIT_S):
            return ""
    except HTTPError as error:
        error.close()
        moved = " (a redirect is not followed: use the address that it leads to)" if error.code // 100 == 3 else ""
        return f"it answered {error.code}{moved}"
    except (URLError, OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            return f"no answer within {LIMIT_S:.0f} s"
        return network_words(reason) if isinstance(reason, OSError) else type(reason).__name__


# -------------------------------------------------------------------- messages


def told(events: Iterable[Mapping[str, Any]]) -> tuple[dict[tuple[str, str], Mapping[str, Any]], list[dict[str, Any]]]:
    """Return (kind, slot) -> the first event of each open trouble, and the messages that were not delivered."""
    began: dict[tuple[str, str], Mapping[str, Any]] = {}
    waiting: dict[tuple[str, str], dict[str, Any]] = {}
    for e in events:
        if not e["who"].startswith(SUPERVISOR):
            continue
        mark = (str(e.get("id", "")), str(e.get("state", "")))
        if e["event"] in (BEGUN, OVER) and all(isinstance(e.get(name), str) for name in WORDS):
            waiting[mark] = {k: v for k, v in e.items() if k not in ("who", "generation", "event")}
            key = (e["kind"], e["slot"])
            began.pop(key, None)
            began |= {key: e} if e["event"] == BEGUN else {}
        elif e["event"] in ("alerted", "alert_failed"):
            waiting.pop(mark, None)
    return began, list(waiting.values())


def changes(
    began: Mapping[tuple[str, str], Mapping[str, Any]], found: Sequence[Trouble], now: float
) -> list[dict[str, Any]]:
    """Return a message for each trouble that began, and for each trouble that is over.   began: the open troubles."""
    there = {trouble.key for trouble in found}
    new_id = lambda t: f"{t.kind}-{t.slot or 'run'}-{now:.3f}"  # noqa: E731
    news = [{**asdict(t), "id": new_id(t), "state": "begun"} for t in found if t.key not in began]
    over = [e for key, e in began.items() if key not in there]
    return [*news, *({**{k: e.get(k) for k in (*WORDS, "step")}, "state": "over"} for e in over)]


def payload(message: Mapping[str, Any], name: str) -> bytes:
    """Return the JSON of a message.   name: the run's name."""
    about = " ".join(str(part) for part in (message["kind"], message["slot"]) if part)
    is_over = message["state"] == "over"
    words = f"over ({message['text']})" if is_over else f"{message['text']}. {message['advice']}"
    text = f"diloco {name}: {about}: {words}"
    said = {k: v for k, v in message.items() if k != "text"}
    return json.dumps({"text": text, **said, "seen": message["text"], "run": name}).encode()


# -------------------------------------------------------------------- delivery


class Messenger:
    """Delivers messages in a thread, in order.   pauses_s: between the tries for one message."""

    def __init__(self, send: Callable[[bytes], str], pauses_s: Sequence[float], limit_s: float) -> None:
        self._send = send
        self._pauses_s = pauses_s
        self._limit_s = limit_s
        self._waiting: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        self.settled: queue.Queue[tuple[dict[str, Any], str]] = queue.Queue()
        self.open = 0  # messages whose result was not taken yet; only the caller's thread changes this
        threading.Thread(target=self._deliver_all, name="alerts", daemon=True).start()

    def put(self, message: dict[str, Any], body: bytes) -> None:
        self.open += 1
        self._waiting.put((message, body))

    def take(self, limit_s: float = 0.0) -> tuple[dict[str, Any], str] | None:
        """Return a finished message, with "" or the reason of its failure; None if none finishes within `limit_s`."""
        try:
            found = self.settled.get(timeout=limit_s) if limit_s > 0 else self.settled.get_nowait()
        except queue.Empty:
            return None
        self.open -= 1
        return found

    def _deliver_all(self) -> None:
        while True:
            message, body = self._waiting.get()
            self.settled.put((message, self._deliver(body)))

    def _deliver(self, body: bytes) -> str:
        why = self._try_once(body)
        for pause_s in self._pauses_s:
            if not why:
                return ""
            time.sleep(pause_s)
            why = self._try_once(body)
        return f"{why}, {1 + len(self._pauses_s)} times" if why else ""

    def _try_once(self, body: bytes) -> str:
        """Send once, in another thread, because a server that answers byte by byte would block this thread."""
        answer: queue.Queue[str] = queue.Queue()
        threading.Thread(target=lambda: answer.put(self._send(body)), name="alert", daemon=True).start()
        try:
            return answer.get(timeout=self._limit_s)
        except queue.Empty:
            return f"no answer within {self._limit_s:.0f} s"


class Alerts:
    """The alerts of one supervisor.   url: the webhook's URL.   emit: writes into the run's log."""

    def __init__(
        self,
        url: str,
        clock: Clock,
        emit: Emit,
        *,
        pauses_s: Sequence[float] = PAUSES_S,
        limit_s: float = LIMIT_S,
        check_s: float = CHECK_S,
    ) -> None:
        self._clock = clock
        self._emit = emit
        self._check_s = check_s
        self._check_at = float("-inf")
        self._began: dict[tuple[str, str], Mapping[str, Any]] | None = None
        self._host = host_of(url)
        self._messenger = Messenger(lambda body: post(url, body), pauses_s, limit_s + 1.0)

    def tick(self, report: Report, *, last: bool = False) -> None:
        """Look for troubles if a check is due, or if this is the last call.  Return at once, without any waiting."""
        while (settled := self._messenger.take()) is not None:
            self._log_one(settled)
        if not (last or self._clock.now() >= self._check_at) or report.wanted.stop:
            return
        self._check_at = self._clock.now() + self._check_s
        if self._began is None:
            self._began, undelivered = told(report.events)
            for message in undelivered:
                self._messenger.put(message, payload(message, report.name))
        now = self._clock.wall()
        found = [t for t in all_troubles(report, now) if t.kind not in UNTOLD]
        for message in changes(self._began, found, now):
            self._tell(message, report.name)

    def close(self) -> None:
        """Wait up to CLOSE_S for open messages; the next supervisor sends the rest."""
        until = self._clock.now() + CLOSE_S
        while self._messenger.open and (left_s := until - self._clock.now()) > 0:
            self._log_one(self._messenger.take(left_s))

    def _tell(self, message: dict[str, Any], name: str) -> None:
        assert self._began is not None
        key = (message["kind"], message["slot"])
        self._began.pop(key, None)
        if message["state"] == "begun":
            self._began[key] = message
        message["at"] = self._clock.wall()
        said = {k: v for k, v in message.items() if k != "at"}  # the log adds its own time
        self._emit(BEGUN if message["state"] == "begun" else OVER, **said)
        self._messenger.put(message, payload(message, name))

    def _log_one(self, found: tuple[dict[str, Any], str] | None) -> None:
        if found is not None:
            message, why = found
            about = {"id": message["id"], "state": message["state"], "kind": message["kind"], "host": self._host}
            self._emit("alert_failed" if why else "alerted", **about, **({"text": why} if why else {}))
