"""The Hub's side of `HfApi.create_repo` and `upload_folder`, on loopback, for the real client.

    with HubWriter() as hub: os.environ["HF_ENDPOINT"] = hub.url; …; hub.repos["me/x"]["README.md"]

Files come inside the commit (no LFS, no Xet).   private: repository -> as it was asked for.   token: that may write.

Not promised: reading what was written by the Hub's own paths.
"""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class HubWriter:
    def __init__(self, token: str = "hf_writes") -> None:
        self.token = token
        self.repos: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: Any) -> None:
                pass

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                allowed = self.headers.get("Authorization") == f"Bearer {hub.token}"
                self._send(*(hub.answer(self.path, body) if allowed else (401, {"error": "Invalid credentials"})))

            def do_GET(self) -> None:
                name = self.path.removeprefix("/api/models/").partition("/tree/")[0]
                if "/tree/" not in self.path or name not in hub.repos:
                    return self._send(404, {"error": "not found"})
                files = [{"type": "file", "path": p, "size": len(b), "oid": "0"} for p, b in hub.repos[name].items()]
                self._send(200, files)

            def _send(self, status: int, found: Any) -> None:
                told = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told)

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        """Status and JSON of a request that may write."""
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization', 'me')}/{asked['name']}"
            self.repos.setdefault(name, {})
            self.private.setdefault(name, asked.get("private", False) or asked.get("visibility") == "private")
            return 200, {"url": f"{self.url}/{name}"}
        name, _, verb = path.removeprefix("/api/models/").partition("/preupload/")
        if verb:
            asked = json.loads(body)["files"]
            files = [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in asked]
            return 200, {"files": files}
        name, _, verb = path.removeprefix("/api/models/").partition("/commit/")
        if not verb:
            return 404, {"error": path}
        for line in body.decode().splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                self.repos[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            if entry["key"] == "deletedFile":
                self.repos[name].pop(entry["value"]["path"], None)
        return 200, {"commitUrl": f"{self.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True}

    def __enter__(self) -> "HubWriter":
        threading.Thread(target=self._http.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
