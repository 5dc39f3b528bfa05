"""The HTTP side of tests/support/hf_server.py: which path is what, and how the Hub's answers look.

Not promised: paths and fields that huggingface_hub does not use.
"""

import json
import re
import socket
import sys
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlencode, urlsplit

if TYPE_CHECKING:
    from tests.support.hf_server import HFServer

NAMESPACE, MOST_LIMIT_S = "tester", 7 * 86400
ENDED = ("COMPLETED", "CANCELED", "ERROR", "DELETED")


class Http(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256
    hub: "HFServer"

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Refused(Exception):
    pass


NEW = {"createdAt": "2026-11-01T00:00:00.000Z", "size": 0, "totalFiles": 0}  # what a bucket tells of itself


class Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True
    server: Http  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    # ------------------------------------------------------------------ one request

    def _request(self) -> None:
        self.hub, url = self.server.hub, urlsplit(self.path)
        self.query, self.parts = parse_qsl(url.query), url.path.strip("/").split("/")
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.fault = self.hub.met(self.command, url.path)
        kind = self.fault.kind if self.fault else ""
        self.hub.wait_for_others(self.command, url.path)
        if kind == "dropped":
            return self._hang_up()
        if kind.isdecimal():
            return self._error(int(kind), "injected")
        try:
            answer = self._route()() if self._known() else None
        except _Refused as error:
            return self._error(400, str(error))
        if kind == "lost":
            return self._hang_up()
        if answer is not None:
            self._json(200, answer)

    do_GET = do_POST = do_PUT = do_HEAD = _request

    def _known(self) -> bool:
        if self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            return True
        self._error(401, "Invalid credentials in Authorization header")
        return False

    def _route(self) -> Callable[[], Any]:
        match [self.command, *self.parts]:
            case ["GET", "api", "whoami-v2"]:
                return lambda: {"type": "user", "name": NAMESPACE}
            case ["GET", "api", "jobs", "hardware"]:
                return self._hardware
            case ["GET", "api", "jobs", _]:
                return self._list
            case ["POST", "api", "jobs", _]:
                return self._create
            case [_, "api", "jobs", _, job_id, *rest]:
                if job_id not in self.hub.jobs:
                    return self._missing
                self.job = self.hub.jobs[job_id]
                return self._about_job("/".join([self.command, *rest]))
            case [_, "api", "buckets", owner, name, *rest]:
                self.bucket = f"{owner}/{name}"
                return self._about_bucket("/".join([self.command, *rest]))
        return self._missing

    def _about_job(self, what: str) -> Callable[[], Any]:
        return {
            "GET": lambda: self.hub.told(self.job),
            "GET/logs": self._logs,
            "POST/cancel": self._cancel,
            "POST/duplicate": lambda: self.hub.told(self.hub.create(self.job.namespace, self.job.asked)),
            "PUT/labels": self._label,
        }.get(what, self._missing)

    def _about_bucket(self, what: str) -> Callable[[], Any]:
        if what != "POST" and self.bucket not in self.hub.buckets:
            return self._missing
        token = lambda: {"casUrl": self.hub.new_store(), "accessToken": "x", "exp": int(time.time()) + 3600}  # noqa: E731
        return {
            "GET": lambda: {"id": self.bucket, "private": True, **NEW},
            "POST": self._create_bucket,
            "POST/paths-info": self._paths,
            "GET/xet-write-token": token,
            "POST/batch": self._batch,
        }.get(what, self._missing)

    # ------------------------------------------------------------------ jobs

    def _hardware(self) -> list[dict[str, Any]]:
        return [_flavor(name, usd, model) for name, (usd, model) in self.hub.flavors.items()]

    def _list(self) -> None:
        """The newest first, in pages."""
        wanted = [value.split("=", 1) for key, value in self.query if key == "label"]
        stages = [value for key, value in self.query if key == "stage"]
        if 0 < self.hub.blind_after < self.hub.count("GET", f"^/api/jobs/{self.parts[2]}$"):
            return self._error(503, "injected")
        known = [] if self.fault and self.fault.kind == "behind" else list(self.hub.jobs.values())
        found = [j for j in reversed(known) if j.namespace == self.parts[2]]
        found = [j for j in found if all(j.asked.get("labels", {}).get(k) == v for k, v in wanted)]
        found = [j for j in found if not stages or j.stage in stages]
        at = int(dict(self.query).get("skip", 0))
        rest = [q for q in self.query if q[0] != "skip"] + [("skip", str(at + self.hub.page))]
        more = f'<{self.hub.endpoint}/api/jobs/{self.parts[2]}?{urlencode(rest)}>; rel="next"'
        headers = {"Link": more} if at + self.hub.page < len(found) else {}
        self._json(200, [self.hub.told(j) for j in found[at : at + self.hub.page]], headers)

    def _create(self) -> dict[str, Any]:
        asked = json.loads(self.body)
        if asked["flavor"] not in self.hub.flavors:
            raise _Refused(f"Invalid flavor: {asked['flavor']}")
        if asked.get("timeoutSeconds", 0) > MOST_LIMIT_S:
            raise _Refused(f"timeoutSeconds must be at most {MOST_LIMIT_S}")
        for key, value in asked.get("labels", {}).items():
            if not re.fullmatch(r"[A-Za-z0-9_-]{1,100}", key) or not re.fullmatch(r"[A-Za-z0-9_-]{0,100}", value):
                raise _Refused(f"Invalid label: {key}={value}")
        return self.hub.told(self.hub.create(self.parts[2], asked))

    def _cancel(self) -> dict[str, Any]:
        self.hub.cancel(self.job)
        return {}

    def _label(self) -> dict[str, Any]:
        self.job.asked["labels"] = json.loads(self.body)["labels"]
        return self.hub.told(self.job)

    def _logs(self) -> None:
        """Server-sent events until the job has ended; the stream of a running one stays open."""
        tail = dict(self.query).get("tail")
        job, sent, left = self.job, 0, self.fault.after if self.fault and self.fault.kind == "stream" else -1
        sent = max(0, len(job.lines) - int(tail)) if tail else 0
        self._head(200, {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"})
        while not self.hub.closed:
            with job.news:
                lines, over = job.lines[sent:], job.stage in ENDED
            for at, text in lines:
                if left == 0:
                    return self._hang_up()
                self._chunk(f"data: {json.dumps({'timestamp': at, 'data': text})}\n\n")
                sent, left = sent + 1, left - 1
            if over:
                break
            with job.news:
                if len(job.lines) == sent and job.stage not in ENDED and not job.news.wait(30.0):
                    self._chunk(": keep-alive\n\n")
        self._chunk("")

    # ------------------------------------------------------------------ buckets

    def _create_bucket(self) -> Any:
        told = {"url": f"{self.hub.endpoint}/buckets/{self.bucket}"}
        if self.bucket in self.hub.buckets:
            return self._json(409, {**told, "error": "You already created this bucket"})
        self.hub.buckets[self.bucket] = {}
        return told

    def _paths(self) -> list[dict[str, Any]]:
        there = self.hub.buckets[self.bucket]
        wanted = json.loads(self.body)["paths"]
        return [{"type": "file", "path": p, "size": 1, "xetHash": there[p]} for p in wanted if p in there]

    def _batch(self) -> dict[str, Any]:
        for line in self.body.splitlines():
            told = json.loads(line)
            assert told["type"] == "addFile", told
            self.hub.blob(told["xetHash"])  # while the client that has uploaded it still lives
            self.hub.buckets[self.bucket][told["path"]] = told["xetHash"]
        return {"success": True}

    # ------------------------------------------------------------------ answers

    def _missing(self) -> None:
        self._error(404, f"{self.command} {self.path}: there is nothing like that")

    def _error(self, status: int, text: str) -> None:
        self._json(status, {"error": text})

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})})
        self.wfile.write(body)

    def _head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _chunk(self, text: str) -> None:
        body = text.encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))

    def _hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def _flavor(name: str, usd: float, model: str) -> dict[str, Any]:
    """A row of the hardware list, as the Hub sends it."""
    gpu = {"type": "gpu", "model": model, "quantity": "1", "vram": "16 GB", "manufacturer": "Nvidia"}
    price = {"unitCostMicroUSD": round(usd * 1e6), "unitCostUSD": usd, "unitLabel": "minute"}
    return {
        "name": name,
        "prettyName": name,
        "cpu": "2 vCPU",
        "ram": "16 GB",
        "accelerator": gpu if model else None,
        **price,
    }
