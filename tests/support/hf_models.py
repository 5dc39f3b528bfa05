"""Repositories of the Hub on loopback, for the real huggingface_hub: folders, served under one commit each.

    with HubModels({"tester/tiny": folder}) as hub:  os.environ["HF_ENDPOINT"] = hub.url
    with HubDatasets({"tester/sums": folder}) as hub:     the same for `datasets`

Not promised: anything but reading.   asked: (verb, path) of every request.   down: the status that every request gets,
0 for none.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class HubModels:
    def __init__(self, models: Mapping[str, Path]) -> None:
        self.models, self.asked, self.down = dict(models), list[tuple[str, str]](), 0
        self.swapped: dict[str, bytes] = {}  # file name -> other bytes than the folder has
        self.gated = set[str]()
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_GET(self) -> None:
                hub.asked.append((self.command, self.path))
                status, headers, body = hub.answer(unquote(urlsplit(self.path).path))
                if status == 200 and (asked := self.headers.get("Range", "")):
                    first, _, last = asked.removeprefix("bytes=").partition("-")
                    start, end = int(first), min(int(last or len(body)), len(body) - 1)
                    headers["Content-Range"] = f"bytes {start}-{end}/{len(body)}"
                    status, body = 206, body[start : end + 1]
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> "HubModels":
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def commit(self, name: str) -> str:
        """The commit hash of the files that are in the folder now, swapped ones included."""
        return hashlib.sha1("".join(hash_of(p) for p in self._files(name)).encode()).hexdigest()

    def downloaded(self) -> list[str]:
        """Files whose bytes were asked for."""
        return [path.rpartition("/")[2] for verb, path in self.asked if verb == "GET" and "/resolve/" in path]

    def _files(self, name: str) -> list[Path]:
        return sorted(p for p in self.models[name].rglob("*") if p.is_file())

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        if self.down:
            return self.down, {}, b"down"
        if parts[:2] == ["api", "models"]:
            name = "/".join(parts[2:4])
            if parts[4:5] == ["tree"]:
                return self._refused(name, parts[5]) or self._folder(name, "/".join(parts[6:]))
            return self._info(name, parts[5] if len(parts) > 5 else "main")
        if parts[2:3] != ["resolve"]:
            return 404, {}, b"no such endpoint"
        return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]))

    def _refused(self, name: str, revision: str) -> tuple[int, dict[str, str], bytes] | None:
        if name not in self.models:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"Repository not found"
        if revision not in ("main", self.commit(name)):
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"Revision not found"
        return None

    def _info(self, name: str, revision: str) -> tuple[int, dict[str, str], bytes]:
        if refused := self._refused(name, revision):
            return refused
        siblings = [{"rfilename": p.relative_to(self.models[name]).as_posix()} for p in self._files(name)]
        answer = {"id": name, "modelId": name, "sha": self.commit(name), "siblings": siblings, "tags": []}
        return 200, {"Content-Type": "application/json"}, json.dumps(answer).encode()

    def _file(self, name: str, revision: str, file: str) -> tuple[int, dict[str, str], bytes]:
        if refused := self._refused(name, revision):
            return refused
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo"}, b"Access to this model is restricted"
        path, commit = self.models[name] / file, self.commit(name)
        if not path.is_file():
            return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b"Entry not found"
        body = self.swapped.get(file, path.read_bytes())
        return 200, {"ETag": f'"{hash_of(path)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}, body

    def _folder(self, name: str, below: str) -> tuple[int, dict[str, str], bytes]:
        folder = self.models[name] / below
        if not folder.is_dir():
            return 404, {"X-Error-Code": "EntryNotFound"}, b"Entry not found"
        entries = [self._entry(name, path) for path in sorted(folder.iterdir())]
        return 200, {"Content-Type": "application/json"}, json.dumps(entries).encode()

    def _entry(self, name: str, path: Path) -> dict[str, Any]:
        kind, oid = ("directory", "0" * 40) if path.is_dir() else ("file", hash_of(path)[:40])
        relative = path.relative_to(self.models[name]).as_posix()
        return {"type": kind, "oid": oid, "size": path.stat().st_size, "path": relative}


class HubDatasets(HubModels):
    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        parts = path.strip("/").split("/")
        if self.down:
            return self.down, {}, b"down"
        if parts[0] == "datasets":  # /datasets/OWNER/NAME/resolve/REVISION/FILE
            return self._file("/".join(parts[1:3]), parts[4], "/".join(parts[5:]))
        name = "/".join(parts[2:4])
        if parts[:2] != ["api", "datasets"]:
            return 404, {}, b"no such endpoint"
        if parts[4:5] == ["tree"]:
            return self._refused(name, parts[5]) or self._folder(name, "/".join(parts[6:]))
        return self._info(name, parts[5] if len(parts) > 5 else "main")


def hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
