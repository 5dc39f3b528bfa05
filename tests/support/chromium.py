"""A real Chromium without a window, driven over its DevTools socket.  Only where one is installed.

    with Chromium() as browser:
        tab = browser.open("file:///…/report.html", width=390, dark=True)
        tab.evaluate("document.title")        tab.wait_for("document.documentElement.dataset.drawn === '12'")
        tab.errors                            console errors, exceptions, refused by the content policy
        tab.asked                             URLs that were asked for
        tab.screenshot(path)                  the whole page

Not promised: another browser; a Chromium older than 2022.
"""

import base64
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip
PATIENCE_S = 120.0  # it only finds a hang


def chromium_path() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def require_chromium() -> None:
    if chromium_path() is None:
        pytest.skip(f"no Chromium on this machine ({', '.join(NAMES)})")
    pytest.importorskip("websockets", reason="websockets drives Chromium: pip install 'serverless-diloco[dev]'")


class Tab:
    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []
        self.asked: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=PATIENCE_S))
            if message.get("id") == self._number:
                assert "error" not in message, message
                return message["result"]
            self._hear(message)

    def _hear(self, message: dict[str, Any]) -> None:
        method, about = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"])[:1500])
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(about["args"])[:1500])
        elif method == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")
        elif method == "Network.requestWillBeSent":
            self.asked.append(about["request"]["url"])

    def evaluate(self, expression: str) -> Any:
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_until_drawn(self) -> str:
        """-> how many outer steps the page shows."""
        return self.wait_for("document.documentElement && document.documentElement.dataset.drawn")

    def wait_for(self, expression: str) -> Any:
        """An expression that cannot be evaluated yet is not yet true."""
        until = time.monotonic() + PATIENCE_S
        while not (value := self.evaluate(f"(() => {{ try {{ return {expression}; }} catch {{ return null; }} }})()")):
            assert time.monotonic() < until, f"never: {expression}; {self.errors}"
            time.sleep(0.02)
        return value

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def resize(self, width: int, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


class Chromium:
    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        path = chromium_path()
        assert path is not None
        self._process = subprocess.Popen(
            [path, *FLAGS, f"--user-data-dir={self._folder}", "about:blank"],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        self._port = self._read_port()

    def _read_port(self) -> int:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "DevTools listening on" in line:
                return int(line.rpartition("127.0.0.1:")[2].partition("/")[0])
        raise AssertionError("Chromium ended before it listened")

    def __enter__(self) -> "Chromium":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        if self._process.stderr is not None:
            self._process.stderr.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Tab]:
        from websockets.sync.client import connect

        made = urllib.request.Request(f"http://127.0.0.1:{self._port}/json/new?about:blank", method="PUT")
        with urllib.request.urlopen(made) as answer:
            about = json.load(answer)
        with connect(about["webSocketDebuggerUrl"], max_size=None, ping_interval=None) as socket:
            tab = Tab(socket)
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.call(f"{domain}.enable")
            tab.resize(width, height)
            tab.call("Emulation.setFocusEmulationEnabled", enabled=True)
            wish = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
            tab.call("Emulation.setEmulatedMedia", features=[wish])
            tab.call("Page.navigate", url=url)
            yield tab
            tab.call("Page.close")
