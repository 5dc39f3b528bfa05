"""`diloco watch RUN --web` and `--publish`: the page of a running run, on a port, in the bucket, or both.

    PageLooks.look ─▶ files ─┬─▶ PageServer    --web: until Ctrl-C
                             └─▶ Publisher     --publish: every PUBLISH_S, until the run is over

Only --publish writes, and only below page/.  If writing is refused, the command says so and --web continues.

Not promised: a page in a bucket that is less than PUBLISH_S old.
"""

import json
import sys
from dataclasses import dataclass
from typing import TextIO

from diloco.runlog.opening import View, open_view
from diloco.runlog.scope import COSTS
from diloco.views.page.freeze import Publisher
from executors.cli.looking.report import publish_refused
from executors.cli.opening import ask_again
from executors.cli.watch.looks import error_words
from executors.cli.web import server as web
from executors.cli.web.looks import POLL_S, PageLooks
from rendezvous.clock import Clock
from rendezvous.errors import RendezvousError

PUBLISH_S = 30.0  # between two writes


@dataclass(frozen=True)
class PageRequest:
    """The options.   web: serve at bind:port.   port: None: the default, else a free one; 0: a free one."""

    web: bool = False
    publish: bool = False
    port: int | None = None
    bind: str = "127.0.0.1"
    as_json: bool = False


def watch_page(asked: PageRequest, url: str, clock: Clock) -> int:
    """Serve the page, publish it, or both; return the exit code.   Raises ConfigError, UsageError before that."""
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


def _serve(asked: PageRequest, looks: PageLooks) -> web.PageServer:
    listening = web.bound_socket(asked.bind, asked.port)
    door = web.make_door(asked.bind, listening.getsockname()[1])
    server = web.PageServer(web.PageApp(door, looks.name, lambda: looks.files, lambda: looks.stale), listening)
    server.start()
    address = web.page_address(asked.bind, door)
    words = f"the run is at {address}   (Ctrl-C ends the view, never the run)"
    print(json.dumps({"address": address}) if asked.as_json else words, flush=True)
    return server


def _look_on(looks: PageLooks, clock: Clock, publisher: "PageWriter | None", *, ends: bool) -> None:
    """Look repeatedly.   ends: return once the run is over and published, or cannot be published."""
    while True:
        looks.look()
        if publisher is not None:
            publisher.write(looks)
            if ends and (publisher.refused or (looks.is_over and looks.is_whole)):
                return
        clock.sleep(looks.pause_s)


class PageWriter:
    """Writes the page into the bucket.   refused: the first write has failed, so no other is tried."""

    def __init__(self, view: View, clock: Clock, out: TextIO) -> None:
        self._publisher = Publisher(view.run.store, str(view.run.record.config.get("name", "run")))
        self._clock = clock
        self._out = out
        self._next = 0.0
        self._told = False
        self.refused = False

    def write(self, looks: PageLooks) -> None:
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
