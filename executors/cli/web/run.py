"""`diloco watch RUN --web` and `--publish`: the page of a running run, on a port, in the bucket, or both.

    PageLooks.look ─▶ files ─┬─▶ PageServer    --web: until Ctrl-C
                             └─▶ Publisher     --publish: every PUBLISH_S, until the run is over

    bucket ──LiveReader──▶ report ──page_data──▶ files   head.json, 0.json, 1.json, …      all replaced at once
       └─ an error: files stay, head.json says since when they are stale; the next look is after 5, 10, 20 … 60 s

Only this reader sends requests to the bucket, one per second, for any number of browsers.  Only --publish writes, and
only below page/.  If writing is refused, the command says so and --web continues.

Not promised: a page in a bucket that is less than PUBLISH_S old; new chunks of earlier steps at every look: they are
made after a new outer step, or after CHUNKS_S.
"""

import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, TextIO

from diloco.runlog.opening import View, open_view
from diloco.runlog.reader import Report
from diloco.runlog.scope import COSTS
from diloco.views.live import LiveReader
from diloco.views.page.data import EncodedChunks, chunks_of, encode_chunks, head_of, json_bytes
from diloco.views.page.freeze import Publisher
from diloco.views.page.rollouts import RolloutEnds
from executors.cli.looking.report import page_beside, publish_refused
from executors.cli.opening import ask_again
from executors.cli.watch.looks import error_words
from executors.cli.web import server as web
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError

ROLLOUTS_S = 300.0  # seconds between two reads of rollouts, each of which costs a few requests
CHUNKS_S = 120.0  # seconds without an outer step, after which chunks are made again, because logs may be late
POLL_S = 3.0  # seconds between two requests of a browser
PUBLISH_S = 30.0  # seconds between two writes of the page into the bucket


@dataclass(frozen=True)
class PageRequest:
    """The options.   web: serve at bind:port.   port: 0: any free port; None: the default port, or a free one."""

    web: bool = False
    publish: bool = False
    port: int | None = None
    bind: str = "127.0.0.1"
    as_json: bool = False


def watch_page(asked: PageRequest, url: str, clock: Clock) -> int:
    """Serve the page, publish it, or both; return the exit code.   Raise ConfigError or UsageError before the start."""
    if asked.web:
        web.check_web()
    view = ask_again(lambda: open_view(url, COSTS), clock)
    looks = PageLooks(view, clock, POLL_S if asked.web else PUBLISH_S)
    server = _serve(asked, looks) if asked.web else None
    publisher = PageWriter(view, clock, sys.stderr if asked.as_json else sys.stdout) if asked.publish else None
    try:
        _look_on(looks, clock, publisher, ends=server is None)
    except KeyboardInterrupt:
        return 0
    finally:
        if server is not None:
            server.stop()
    return 0 if publisher is None or not publisher.refused else 1


def _serve(asked: PageRequest, looks: "PageLooks") -> web.PageServer:
    listening = web.bound_socket(asked.bind, asked.port)
    door = web.make_door(asked.bind, listening.getsockname()[1])
    server = web.PageServer(web.PageApp(door, looks.name, lambda: looks.files, lambda: looks.stale), listening)
    server.start()
    address = web.page_address(asked.bind, door)
    words = f"the run is at {address}   (Ctrl-C ends the view, never the run)"
    print(json.dumps({"address": address}) if asked.as_json else words, flush=True)
    return server


def _look_on(looks: "PageLooks", clock: Clock, publisher: "PageWriter | None", *, ends: bool) -> None:
    """Look repeatedly.   ends: return once the run is over and published, or cannot be published."""
    while True:
        looks.look()
        if publisher is not None:
            publisher.write(looks)
            if ends and (publisher.refused or (looks.is_over and looks.is_whole)):
                return
        clock.sleep(looks.pause_s)


class PageWriter:
    """Writes the page into the bucket.   refused: the first write has failed, so the writer tries no other."""

    def __init__(self, view: View, clock: Clock, out: TextIO) -> None:
        self._publisher = Publisher(view.run.store, str(view.run.record.config.get("name", "run")))
        self._clock = clock
        self._out = out
        self._next = 0.0
        self._told = False
        self.refused = False

    def write(self, looks: "PageLooks") -> None:
        """Write the page every PUBLISH_S, and at once when the run is over."""
        if self.refused or "head.json" not in looks.files or not looks.is_whole:
            return
        if self._clock.now() < self._next and not looks.is_over:
            return
        self._next = self._clock.now() + PUBLISH_S
        try:
            self._publisher.publish(looks.files)
        except (RendezvousError, OSError) as error:
            self.refused = not self._told
            self._say(publish_refused(error) if self.refused else f"not published: {error_words(error)}; again later")
            return
        if not self._told:
            self._told = True
            self._say(f"published: {self._publisher.url}")

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


# -------------------------------------------------------------------- the reads


class PageLooks:
    """The reads of one run, in sequence.   files: the newest complete data.   stale: the error and its time, or ""."""

    def __init__(self, view: View, clock: Clock, poll_s: float = POLL_S) -> None:
        self.name = str(view.run.record.config.get("name", "run"))
        self.files: dict[str, bytes] = {}
        self.stale = ""
        self.is_over = False
        self._clock = clock
        self._poll_s = poll_s
        self._live = LiveReader(view, clock)
        self._rollouts = RolloutEnds(self._live.store)
        self._failing_since = 0.0
        self._head: dict[str, Any] = {}
        self._chunks = EncodedChunks()
        self._chunks_of = -1, float("-inf")  # number of outer steps in the chunks, and when they were made
        self._rollouts_at = float("-inf")

    @property
    def pause_s(self) -> float:
        return self._live.pause_s

    @property
    def is_whole(self) -> bool:
        """Whether all parts of the run have been read at least once."""
        return self._live.is_whole

    def look(self) -> None:
        """Look once; an error of the bucket is shown on the page, which is otherwise unchanged."""
        try:
            report = self._live.next_look()
            if report is not None:
                self._read_rollouts(report)
                self._make(report)
        except (RendezvousError, OSError) as error:
            self._failing_since = self._failing_since if self.stale else self._clock.wall()
            self._say_stale(error)
            return
        if self.stale:
            self.stale = ""
            self._put_files()

    def _say_stale(self, error: Exception) -> None:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self._failing_since))
        self.stale = (
            f"The bucket has given no answer since {since}; what is shown was read before. Asking again in "
            f"{self.pause_s:.0f} s. {error_words(error)[:300]}"
        )
        self._put_files()

    def _read_rollouts(self, report: Report) -> None:
        """Read rollouts after everything else has been read once, and then every ROLLOUTS_S."""
        now = self._clock.now()
        if self._live.is_whole and now - self._rollouts_at >= ROLLOUTS_S:
            self._rollouts_at = now
            before = self._live.store.requests
            self._rollouts.read(report)
            self._live.charge(self._live.store.requests - before)

    def _make(self, report: Report) -> None:
        now = self._clock.wall()
        self.is_over = report.done or report.stopped
        self._make_chunks(report)
        beside = replace(
            page_beside(report, self._rollouts, now),
            read_at=self._live.read_at,
            partial=not self._live.is_whole,
            poll_s=self._poll_s,
        )
        self._head = head_of(report, now, beside, self._chunks)
        self._put_files()

    def _make_chunks(self, report: Report) -> None:
        steps, at = self._chunks_of
        if steps != len(report.steps) or self._clock.now() - at >= CHUNKS_S:
            self._chunks = encode_chunks(chunks_of(report))
            self._chunks_of = len(report.steps), self._clock.now()

    def _put_files(self) -> None:
        """Replace all files at once, so that the serving thread never sees a mixture."""
        if self._head:
            head = json_bytes({**self._head, "stale": self.stale})
            self.files = {**{f"{n}.json": body for n, body in self._chunks.bodies.items()}, "head.json": head}
