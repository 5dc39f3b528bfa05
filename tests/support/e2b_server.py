"""A server that speaks as much of E2B's API as boxes use: create, list, kill, connect, commands, files.

    /v2/sandboxes, /sandboxes/ID                       JSON; metadata as labels; Idempotency-Key
    /process.Process/Start                             Connect, JSON: 5 bytes (flag, length) and a message, per message
    /files?path=                                       multipart up, plain down
    /v3/templates, …/files/HASH, …/builds/ID[/status]  templates: their files as tars, their steps, a build of two looks

Boxes are LocalBoxes in namespaces.   lose_replies, refuse, busy, html: what the next creates suffer.   drop: the next
commands' connections are reset.   dead: ids that answer 502.   fail_build: why the next builds fail.
builds: whether it builds templates.   forbids: whether it answers 403 to each request of its API.
"""

import base64
import io
import json
import os
import socket
import struct
import subprocess
import tarfile
import threading
from email import message_from_bytes
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit

from inner.extras.boxes.box import BoxOwner, BoxRecipe
from inner.extras.boxes.local import LocalBox, LocalBoxes
from tests.support.planted_boxes import namespaces

KEY = "e2b_" + "0" * 40


class E2bServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.local = LocalBoxes(folder, wrap=namespaces)
        self.boxes: dict[str, tuple[LocalBox, dict[str, str]]] = {}
        self.online: list[bool | None] = []  # allow_internet_access of each new box
        self.keys: dict[str, str] = {}
        self.lose_replies = self.refuse = self.busy = self.html = self.drop = 0
        self.dead = set[str]()
        self.users = list[str]()
        self.templates: dict[str, dict[str, Any]] = {}  # id -> what was asked for, the looks at its build
        self.archives: dict[str, bytes] = {}  # a COPY's hash -> its tar
        self.fail_build, self.builds, self.forbids = "", True, False
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def options(self) -> dict[str, Any]:
        url = self.url
        return {"api_key": KEY, "api_url": url, "sandbox_url": url, "http_version": "1.1", "retries": 0}


class _Handler(BaseHTTPRequestHandler):
    server: E2bServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or self._chunks()
        path = urlsplit(self.path).path
        if self.server.forbids and path in ("/v2/sandboxes", "/v3/templates"):
            self._json(403, {"code": 403, "message": "this team is blocked"})
        elif path == "/v2/sandboxes":
            self._create(json.loads(body))
        elif path == "/v3/templates" and not self.server.builds:
            self._json(404, {"code": 404, "message": "no such path"})
        elif path == "/v3/templates":
            id = f"tp{len(self.server.templates)}"
            self.server.templates[id] = {**json.loads(body), "looks": 0}
            named = {"names": [], "aliases": [], "tags": [], "public": False}
            self._json(202, {"templateID": id, "buildID": "b", **named})
        elif path.startswith("/v2/templates/"):
            self.server.templates[path.split("/")[3]] |= json.loads(body)
            self._send(202, b"", "application/json")
        elif path.endswith("/connect"):
            self._json(200, self._told(path.split("/")[-2]))
        elif (box := self._box()) is None:
            self._json(502, {"message": "sandbox not found", "code": 502})
        elif path == "/files":
            part = message_from_bytes(b"Content-Type: " + self.headers["Content-Type"].encode() + b"\n\n" + body)
            payload = part.get_payload()[0].get_payload(decode=True)  # pyright: ignore
            box.write(self._path(), payload)  # pyright: ignore
            self._json(200, [{"name": "f", "path": self._path(), "type": "file"}])
        else:
            self._start(box, json.loads(body[5:]))

    def do_PUT(self) -> None:
        self.server.archives[self.path.split("/")[-1]] = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(200, b"", "text/plain")

    def _template(self, id: str, what: str, hash: str) -> None:
        """Answer where a COPY's files go, or how a build goes."""
        if what == "files":
            present = hash in self.server.archives
            return self._json(201, {"present": present, "url": f"{self.server.url}/upload/{hash}"})
        template, why = self.server.templates[id], self.server.fail_build
        template["looks"] += 1
        status = "building" if template["looks"] == 1 else "error" if why else "ready"
        entry = {"timestamp": "2026-01-01T00:00:00Z", "level": "info", "message": "step 1"}
        told = {"logs": [], "logEntries": [entry], "templateID": id, "buildID": "b", "status": status}
        self._json(200, told | ({"reason": {"message": why}} if status == "error" else {}))

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path.startswith("/templates/"):
            return self._template(*path.split("/")[2:5])
        if path == "/v2/sandboxes" and self.server.forbids:
            self._json(403, {"code": 403, "message": "this team is blocked"})
        elif path == "/v2/sandboxes":
            asked = parse_qs(urlsplit(self.path).query).get("metadata", [""])[0]
            labels = {unquote(k): unquote(v) for k, v in parse_qsl(asked)}
            ids = [i for i, (_, told) in self.server.boxes.items() if labels.items() <= told.items()]
            self._json(200, [self._told(i) for i in ids])
        elif (box := self._box()) is None:
            self._json(502, {"message": "sandbox not found"})
        elif path == "/files":
            try:
                self._send(200, box.read(self._path()), "application/octet-stream")
            except FileNotFoundError:
                self._json(404, {"message": "no such file"})
        else:
            self._send(204, b"", "text/plain")

    def do_DELETE(self) -> None:
        box, _ = self.server.boxes.pop(self.path.split("/")[-1], (None, None))
        if box is not None:
            box.stop()
        self._send(204 if box else 404, b"" if box else b'{"code": 404, "message": "gone"}', "application/json")

    def _create(self, asked: dict[str, Any]) -> None:
        if self.headers.get("X-API-Key") != KEY:
            return self._json(401, {"code": 401, "message": "wrong key"})
        if self.server.refuse:
            self.server.refuse -= 1
            return self._json(429, {"code": 429, "message": "quota of 20 sandboxes"})
        if self.server.busy:
            self.server.busy -= 1
            return self._json(503, {"code": 503, "message": "no capacity"})
        if self.server.html:
            self.server.html -= 1
            return self._send(201, b"<html>a proxy</html>", "application/json")
        key = self.headers["Idempotency-Key"]
        if key not in self.server.keys:
            owner = BoxOwner("server", "0", 0, str(len(self.server.keys)))
            box = self.server.local.start(owner, BoxRecipe(folder=asked["metadata"]["folder"]), timeout_s=1)
            self._fill(self.server.folder / box._home.name / "root", self.server.templates.get(asked["templateID"], {}))
            self.server.keys[key] = f"id{len(self.server.keys)}"
            self.server.boxes[self.server.keys[key]] = (box, asked["metadata"])
            self.server.online.append(asked.get("allow_internet_access"))
        if self.server.lose_replies:
            self.server.lose_replies -= 1
            return self._json(504, {"code": 504, "message": "gateway"})
        return self._json(201, self._told(self.server.keys[key]))

    def _fill(self, root: Path, template: dict[str, Any]) -> None:
        """Take a template's COPY and RUN steps in a box, as a builder would."""
        for step in template.get("steps", []):
            if step["type"] == "RUN":
                subprocess.run([*namespaces(root, ""), "bash", "-c", step["args"][0]], check=True)
            elif step["type"] == "COPY":
                with tarfile.open(fileobj=io.BytesIO(self.server.archives[step["filesHash"]])) as archive:
                    (root / step["args"][1].lstrip("/")).write_bytes(archive.extractfile(step["args"][0]).read())  # type: ignore

    def _start(self, box: LocalBox, asked: dict[str, Any]) -> None:
        if self.server.drop:
            self.server.drop -= 1
            self.close_connection = True
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return os.close(self.connection.detach())  # a reset: the SDK lets connectrpc's own error through
        user = base64.b64decode(self.headers.get("Authorization", "").removeprefix("Basic ")).decode().rstrip(":")
        self.server.users.append(user)
        process = asked["process"]
        root = self.server.folder / box._home.name / "root"
        words = [*namespaces(root, user, process.get("cwd", "/")), process["cmd"], *process["args"]]
        done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True)
        end = {"exitCode": done.returncode, "exited": True, "status": f"exit status {done.returncode}"}
        events = [{"start": {"pid": 7}}, {"data": {"stdout": base64.b64encode(done.stdout).decode()}}, {"end": end}]
        frames = [struct.pack(">BI", 0, len(m := json.dumps({"event": e}).encode())) + m for e in events]
        self._send(200, b"".join(frames) + struct.pack(">BI", 2, 2) + b"{}", "application/connect+json")

    def _box(self) -> LocalBox | None:
        name = self.headers.get("E2b-Sandbox-Id", "")
        return None if name in self.server.dead else self.server.boxes.get(name, (None, None))[0]

    def _path(self) -> str:
        return parse_qs(urlsplit(self.path).query)["path"][0]

    def _told(self, name: str) -> dict[str, Any]:
        times = {"startedAt": "2026-01-01T00:00:00Z", "endAt": "2026-01-01T01:00:00Z"}
        size = {"cpuCount": 1, "memoryMB": 512, "diskSizeMB": 512, "state": "running", "clientID": "c"}
        told = {"templateID": "base", "sandboxID": name, "envdVersion": "0.6.0", "envdAccessToken": "t"}
        return {**told, **times, **size, "metadata": self.server.boxes[name][1]}

    def _chunks(self) -> bytes:
        found, chunked = b"", self.headers.get("Transfer-Encoding") == "chunked"
        while chunked:
            n = int(self.rfile.readline(), 16)
            found += self.rfile.read(n)
            self.rfile.readline()  # after the last chunk, too, or it begins the next request
            chunked = n > 0
        return found

    def _json(self, code: int, told: Any) -> None:
        self._send(code, json.dumps(told).encode(), "application/json")

    def _send(self, code: int, body: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
