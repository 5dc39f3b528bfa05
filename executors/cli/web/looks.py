"""The looks of `diloco watch RUN --web` at a run, and the files that its page asks for.

    bucket ──LiveReader──▶ report ──page_data──▶ files   head.json, 0.json, 1.json, …      swapped whole, never half new
       └─ an error: files stay, head.json says since when they are stale; the next look comes after 5, 10, 20 … 60 s

Only this reader sends requests to the bucket, one per second, for any number of browsers.

Not promised: chunks of earlier steps at every look: they are made anew with a new outer step, or after a while.
"""

import time
from dataclasses import replace
from typing import Any

from diloco.runlog.opening import View
from diloco.runlog.reader import Report
from diloco.views.live import LiveReader
from diloco.views.page.data import EncodedChunks, chunks_of, encode_chunks, head_of, json_bytes
from diloco.views.page.rollouts import RolloutEnds
from executors.cli.looking.report import page_beside
from executors.cli.watch.looks import error_words
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError

ROLLOUTS_S = 300.0  # between two looks at rollouts, each of which is a few requests
CHUNKS_S = 120.0  # after which chunks are made anew, though there is no new outer step: late logs
POLL_S = 3.0  # between two questions of a browser


class PageLooks:
    """Looks, one after the other.   files: the newest whole picture.   stale: "", or what is wrong and since when."""

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
        self._chunks_of = -1, float("-inf")  # that many outer steps, made then
        self._rollouts_at = float("-inf")

    @property
    def pause_s(self) -> float:
        return self._live.pause_s

    @property
    def is_whole(self) -> bool:
        """Whether everything has been read once."""
        return self._live.is_whole

    def look(self) -> None:
        """Look once; an error of the bucket is said on the page and changes nothing else there."""
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
            f"The bucket gives no answer since {since}; what is shown was read before. Asking again in "
            f"{self.pause_s:.0f} s. {error_words(error)[:300]}"
        )
        self._put_files()

    def _read_rollouts(self, report: Report) -> None:
        """Read rollouts once everything has been read for the first time, and then every few minutes."""
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
        """Swap all at once, so that the thread that serves them never sees half of them."""
        if self._head:
            head = json_bytes({**self._head, "stale": self.stale})
            self.files = {**{f"{n}.json": body for n, body in self._chunks.bodies.items()}, "head.json": head}
