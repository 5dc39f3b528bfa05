"""The trackio tracker: a SQLite database on this machine, your own server, or a Space, by trackio's settings.

    TRACKIO_SPACE_ID | TRACKIO_SERVER_URL ──▶ over HTTP        neither ──▶ TRACKIO_DIR, ~/.cache/huggingface/trackio

    open   the newest step of the run whose id is the nonce, from the database or the server
    write  one row with log_id = {nonce}-{step}: the database stores each log_id only once

So each row is there once, even if its answer was lost, or if two machines write at the same time.  `trackio.log` gives
each call a new log_id and keeps failed rows for later, so the written rows would be unknown. Therefore this file calls
trackio's internal functions, as they are in the version that our extra requires.

    trackio show --project {project}

Not promised: the times of commits on a server: it stores the time when a row arrives.
"""

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from diloco.views.curves import CurvePoint
from diloco.views.samples import COLUMNS, Sample
from diloco.views.trackers.tracker import TrackedRun, TrackerError


class TrackioTracker:
    name = "trackio"

    def __init__(self) -> None:
        self._run = TrackedRun("", "")
        self._client: Any = None  # client of a server; None: this machine's database
        self._newest = -1

    def open(self, run: TrackedRun) -> int:
        self._run = run
        self._client = _connect(run)
        self._newest = self._find_newest()
        return self._newest

    def write(self, point: CurvePoint, samples: Sequence[Sample]) -> None:
        metrics: dict[str, Any] = dict(point.numbers)
        if samples:
            metrics["samples"] = _table_of(samples, self._run, point.step)
        config = json.loads(json.dumps(dict(self._run.config))) if self._newest < 0 else None
        log_id = f"{self._run.nonce}-{point.step}"
        if self._client is None:
            self._write_here(point, metrics, config, log_id)
        else:
            self._send(point, metrics, config, log_id)
        self._newest = point.step

    def close(self) -> None:
        self._client = None

    def _find_newest(self) -> int:
        run = self._run
        if self._client is None:
            from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

            step = SQLiteStorage.get_max_step_for_run(run.project, run.name, run_id=run.nonce)
        else:
            about = {"project": run.project, "run": run.name, "run_id": run.nonce}
            step = self._client.predict(api_name="/get_run_summary", **about)["last_step"]
        return -1 if step is None else int(step)

    def _write_here(self, point: CurvePoint, metrics: dict[str, Any], config: Any, log_id: str) -> None:
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        SQLiteStorage.bulk_log(
            project=self._run.project, run=self._run.name, run_id=self._run.nonce, metrics_list=[metrics],
            steps=[point.step], timestamps=[datetime.fromtimestamp(point.at, UTC).isoformat()], config=config,
            log_ids=[log_id],
        )  # fmt: skip

    def _send(self, point: CurvePoint, metrics: dict[str, Any], config: Any, log_id: str) -> None:
        entry = {
            "project": self._run.project, "run": self._run.name, "run_id": self._run.nonce, "metrics": metrics,
            "step": point.step, "config": config, "log_id": log_id,
        }  # fmt: skip
        self._client.predict(api_name="/bulk_log", logs=[entry], hf_token=_hf_token())


def _connect(run: TrackedRun) -> Any:
    """Return the client of the Space or server in trackio's settings; None for this machine."""
    from trackio import utils  # pyright: ignore[reportMissingImports]
    from trackio.remote_client import RemoteClient  # pyright: ignore[reportMissingImports]
    from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

    try:
        SQLiteStorage.validate_project_name(run.project)
    except ValueError as error:
        raise TrackerError(f"trackio takes no project {run.project!r}: {error}. Use another --project") from None
    space, server = utils.resolve_space_id_and_server_url(None, None)
    if space is not None:
        import trackio  # pyright: ignore[reportMissingImports]

        made = trackio.init(project=run.project, name=run.name, resume="allow", auto_log_gpu=False, auto_log_cpu=False)
        made.finish()  # init has created the Space if there was none
        return RemoteClient(space, hf_token=_hf_token())
    if server is not None:
        url, token = utils.parse_trackio_server_url(server)
        return RemoteClient(url, write_token=token or os.environ.get("TRACKIO_WRITE_TOKEN"))
    if utils.get_storage_mode() != "sqlite":
        raise TrackerError(
            f"trackio's folder {utils.TRACKIO_DIR} is on a network disk, where its database is not safe. Set "
            "TRACKIO_DIR to a folder on a disk of this machine"
        )
    return None


def _hf_token() -> str | None:
    from huggingface_hub import get_token

    return get_token() if os.environ.get("TRACKIO_SPACE_ID") else None


def _table_of(samples: Sequence[Sample], run: TrackedRun, step: int) -> dict[str, Any]:
    from trackio import Table  # pyright: ignore[reportMissingImports]

    table = Table(columns=list(COLUMNS), data=[list(sample) for sample in samples])
    return table._to_dict(project=run.project, run=run.name, step=step)
