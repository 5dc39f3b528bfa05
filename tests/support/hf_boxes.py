"""Sandboxes of the test server for Hugging Face Jobs: what `sbx-server` answers, as much as boxes use.

    POST /api/jobs with SBX_PORT ─▶ a LocalBox in the place of a process     exposeUrls: ENDPOINT/sbx/ID--PORT.
    /sbx/ID--PORT./health, /v1/exec, /v1/files/stat|read|write

Commands of another user than root run as root here: the namespaces have no other user; `users` has what was asked for.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from inner.errors import InnerError
from inner.extras.boxes.box import USER, BoxGone, BoxOwner, BoxRecipe
from inner.extras.boxes.local import LocalBox, LocalBoxes
from tests.support.hf_http import ENDED, Handler
from tests.support.hf_server import HFServer, Job
from tests.support.planted_boxes import namespaces


class BoxHub(HFServer):
    """dead: ids of jobs whose sandbox answers 502."""

    def __enter__(self) -> "BoxHub":
        super().__enter__()
        return self

    def __init__(self) -> None:
        super().__init__()
        self._http.RequestHandlerClass = BoxHandler
        self.boxes: dict[str, LocalBox] = {}
        self.dead, self.users = set[str](), list[str]()

    @property
    def environ(self) -> dict[str, str]:
        return {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": self.token}

    def live_boxes(self) -> int:
        return sum(self.jobs[id].stage not in ENDED for id in self.boxes)

    def _serve(self, job: Job, left: int) -> None:
        folder = job.asked["environment"]["BOX_FOLDER"]
        box = LocalBoxes(self.root / "boxes", wrap=namespaces).start(
            BoxOwner("hf", "0", 0, job.id), BoxRecipe(folder=folder), timeout_s=1
        )
        with job.news:
            if job.stage == "SCHEDULING":
                self.boxes[job.id], job.stage = box, "RUNNING"

    def cancel(self, job: Job) -> None:
        if job.id in self.boxes:
            self.boxes[job.id].stop()
        job.end("CANCELED", None)

    def told(self, job: Job) -> dict[str, Any]:
        told = super().told(job)
        port = job.asked["environment"]["SBX_PORT"]
        return {**told, "status": {**told["status"], "exposeUrls": [f"{self.endpoint}/sbx/{job.id}--{port}."]}}


class BoxHandler(Handler):
    hub: BoxHub  # pyright: ignore[reportIncompatibleVariableOverride]

    def _route(self) -> Any:
        if self.parts[0] != "sbx":
            return super()._route()
        self.id = self.parts[1].partition("--")[0]
        if self.id in self.hub.dead or self.hub.jobs[self.id].stage in ENDED:
            return lambda: self._json(502, {"error": "no such sandbox"})
        if self.id not in self.hub.boxes:
            return lambda: self._json(503, {"error": "not yet"})
        what = "_".join(self.parts[2:])
        return getattr(self, f"_{what}")

    def _health(self) -> dict[str, Any]:
        return {"protocol": 3}

    def _v1_exec(self) -> None:
        asked = json.loads(self.body)
        words, as_user = asked["cmd"], list(USER)
        self.hub.users.append("1000" if words[: len(as_user)] == as_user else "root")
        words = words[len(as_user) :] if words[: len(as_user)] == as_user else words
        root = self.hub.boxes[self.id]._home / "root"
        done = subprocess.run([*namespaces(root, ""), *words], stdin=subprocess.DEVNULL, capture_output=True)
        events = [
            {"event": "ping"},
            {"event": "stdout", "data": done.stdout.decode(errors="replace")},
            {"event": "exit", "exit_code": done.returncode},
        ]
        body = "".join(json.dumps(event) + "\n" for event in events).encode()
        self._head(200, {"Content-Type": "application/x-ndjson", "Content-Length": str(len(body))})
        self.wfile.write(body)

    def _v1_files_stat(self) -> Any:
        return self._file(
            lambda path, data: {"name": Path(path).name, "path": path, "type": "file", "size": len(data), "mode": "644"}
        )

    def _v1_files_read(self) -> Any:
        def answer(path: str, data: bytes) -> None:
            at, length = (int(dict(self.query)[name]) for name in ("offset", "length"))
            self._head(200, {"Content-Length": str(len(data[at : at + length]))})
            self.wfile.write(data[at : at + length])

        return self._file(answer)

    def _file(self, answer: Any) -> Any:
        path = dict(self.query)["path"]
        try:
            return answer(path, self.hub.boxes[self.id].read(path))
        except (FileNotFoundError, BoxGone, InnerError):
            return self._json(404, {"error": "no such file"})

    def _v1_files_write(self) -> Any:
        query, box = dict(self.query), self.hub.boxes[self.id]
        try:
            if "offset" not in query:
                box.write(query["path"], self.body)
                return {}
            target = box._inside(query["path"])
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644), "wb") as file:
                file.seek(int(query["offset"]))
                file.write(self.body)
            return {}
        except OSError as error:
            return self._json(400, {"error": str(error)})
