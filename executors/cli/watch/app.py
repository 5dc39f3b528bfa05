"""The terminal app of `diloco watch`, built with textual: one screen, a thread that reads, and the keys.

    ┌ header: step, ETA, pace, money, snapshot, supervisor, age of data   ┐      thread:  next_picture ─▶ show
    │ one row per session                                      ↑↓ chooses │                    └ wait pause_s, or `r`
    │ curves                        the chosen one, drawn larger        m │      keys:    never wait for the bucket:
    │ what it waits for, troubles, the newest events with advice          │               each opens a window that
    └ l log · o rollout · e events · m metric · a all · d drain · s · q   ┘               fills when the answer comes

After a failed read the picture stays, with "stale" in the header, and the pauses between reads grow.

Not promised: colours; every state is also shown as a word.
"""

import os
import signal
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from functools import partial
from typing import ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.events import Resize
from textual.widgets import Footer, OptionList, Static

from diloco.views.overview import aged
from diloco.views.troubles import flagged_steps
from executors.cli.watch import words
from executors.cli.watch.looks import Picture, RunLooks, error_words
from executors.cli.watch.panes import ALARM, Panes
from executors.cli.watch.windows import PlainApp, ScaleAction, TextWindow, drain, events_text, log_text, rollouts_text

SMALLEST = (40, 10)  # columns and lines
CURVES_FROM = 20  # lines of a terminal from which curves are shown
TALL_FROM = 36


class WatchApp(PlainApp):
    """The screen of one run."""

    TITLE = "diloco watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; }
    #header { height: 3; }
    #head { height: 1; text-style: bold underline; }
    #rows { height: auto; min-height: 3; border: none; padding: 0; background: $background; }
    #rows > .option-list--option { padding: 0; }
    #rows > .option-list--option-highlighted { background: $background; color: $foreground; text-style: none; }
    #rows:focus > .option-list--option-highlighted { background: $background; color: $foreground; text-style: none; }
    #rows:focus { background: $background; background-tint: $background 0%; }
    #curves { height: 7; }
    #metrics { width: 1fr; height: 7; }
    #chart { width: 1fr; height: 7; padding-left: 2; }
    #events { height: 1fr; min-height: 3; }
    #small { display: none; }
    .short #curves { display: none; }
    .tall #curves { margin-top: 1; }
    .small #small { display: block; }
    .small #header, .small #head, .small #rows, .small #curves, .small #events, .small Footer { display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("l,enter", "log", "log"),
        Binding("o", "rollout", "rollout"),
        Binding("e", "events", "events"),
        Binding("m", "metric", "metric"),
        Binding("a", "everything", "all"),
        Binding("d", "drain", "drain"),
        Binding("s", "scale", "scale"),
        Binding("r", "look", "read now", show=False),
        Binding("q,ctrl+c", "leave", "quit"),
    ]

    def __init__(self, looks: RunLooks, *, reads: bool = True) -> None:
        """Make the app.   reads: start the thread that reads (a test calls `show` itself)."""
        super().__init__()
        self.looks = looks
        self.picture: Picture | None = None
        self.trouble = ""
        self.metric = 0
        self.everything = False
        self._reads = reads
        self.panes = Panes(lambda: self.screen_stack[0])
        self._ended = threading.Event()
        self._wake = threading.Event()

    # ------------------------------------------------------------------ screen

    def compose(self) -> ComposeResult:
        yield Static(id="header", markup=False)
        yield Static(id="head", markup=False)
        yield OptionList(id="rows", markup=False)
        with Horizontal(id="curves"):
            yield Static(id="metrics", markup=False)
            yield Static(id="chart", markup=False)
        yield Static(id="events", markup=False)
        yield Static(
            f"This terminal is too small: {SMALLEST[0]} columns and {SMALLEST[1]} lines are needed.", id="small"
        )
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        self.query_one("#header", Static).update("reading …")
        self.query_one("#rows", OptionList).focus()
        self.set_interval(1.0, self.draw_ages)
        if self._reads:
            threading.Thread(target=self._read_on, name="looks", daemon=True).start()

    def on_resize(self, event: Resize) -> None:
        columns, lines = event.size.width, event.size.height
        screen = self.screen_stack[0]
        screen.set_class(columns < SMALLEST[0] or lines < SMALLEST[1], "small")
        screen.set_class(lines < CURVES_FROM, "short")
        screen.set_class(lines >= TALL_FROM, "tall")
        others = sum((3, 1, 1, 7 * (lines >= CURVES_FROM), lines >= TALL_FROM))  # header, head, footer, curves, gap
        most = (lines - others) * 2 // 3 if lines < TALL_FROM else lines - others - 8
        self.panes.rows.styles.max_height = max(3, most)
        self.panes.forget_rows()
        self.call_after_refresh(self.draw)

    # ------------------------------------------------------------------ reading

    def _read_on(self) -> None:
        """Read pictures, in a thread that ends with the process."""
        while not self._ended.is_set():
            try:
                picture, trouble = self.looks.next_picture(), ""
            except Exception as error:  # the picture stays, and the header says since when it is stale
                if os.environ.get("DILOCO_DEBUG"):
                    raise
                picture, trouble = None, error_words(error)
            if self._ended.is_set():
                return
            with suppress(RuntimeError):  # the app has ended meanwhile
                self.call_from_thread(self.show, picture, trouble)
            self._wake.wait(self.looks.pause_s)
            self._wake.clear()

    def show(self, picture: Picture | None, trouble: str = "") -> None:
        """Show a picture.   picture: None keeps the present picture."""
        self.picture = picture or self.picture
        self.trouble = trouble
        self.draw()

    # ------------------------------------------------------------------ drawing

    def draw(self) -> None:
        if not self.is_running:  # the screen goes, part by part
            return
        self.draw_ages()
        picture = self.picture
        if picture is not None:
            self.panes.draw("#metrics", lambda: self.panes.draw_curves(picture, self.metric))
            self.panes.draw("#events", lambda: self.panes.draw_events(picture, self.trouble))

    def draw_ages(self) -> None:
        """Redraw the ages, which grow between two reads."""
        if not self.is_running:
            return
        width = self.screen_stack[0].size.width
        if self.picture is None:
            text = f"! {self.trouble}; asking again" if self.trouble else "reading …"
            self.panes.static("#header").update(words.cut(text, 2 * width))
            return
        age_s = max(0.0, self.looks.clock.wall() - self.picture.at)
        seen = aged(self.picture.seen, age_s)
        fresh = words.freshness_line(age_s, self.trouble, width)
        more = " · curves are on their way" if self.picture.partial and not self.trouble else ""
        parts = [words.phases_words(seen), self.picture.supervision, f"{fresh}{more}"]
        last = fresh if self.trouble else words.cut(" · ".join(part for part in parts if part), width)
        first = words.header_lines(seen, self.picture.spent, self.picture.wanted, width)
        lines = [*(Text(line, "bold") for line in first), Text(last, ALARM if self.trouble else "dim")]
        self.panes.static("#header").update(Text("\n").join(lines))
        self.panes.draw_rows(list(seen.rows), width, everything=self.everything)

    # ------------------------------------------------------------------ keys

    @property
    def chosen(self) -> str:
        """The session in the chosen row: r01-2, or r01 for a slot without a claim."""
        return self.panes.chosen

    def on_option_list_option_highlighted(self) -> None:
        self.draw_ages()

    def on_option_list_option_selected(self) -> None:
        self.action_log()

    def action_log(self) -> None:
        if self.picture is not None and self.chosen:
            self.push_screen(TextWindow(log_text(self.looks.run, self.picture.wanted, self.chosen), from_end=True))

    def action_rollout(self) -> None:
        if self.chosen and self.picture is not None:
            flagged = flagged_steps(self.picture.troubles, self.picture.seen.step)
            self.push_screen(TextWindow(rollouts_text(self.looks.run, self.chosen, flagged)))

    def action_events(self) -> None:
        if self.picture is not None:
            told = [f"! {found.line}" for found in self.picture.troubles]
            self.push_screen(TextWindow(events_text([*told, *self.picture.messages, *self.picture.events])))

    def action_metric(self) -> None:
        self.metric += 1
        self.draw()

    def action_everything(self) -> None:
        self.everything = not self.everything
        self.draw_ages()

    def action_drain(self) -> None:
        if self.chosen:
            drain(self, self.chosen.partition("-")[0])

    def action_scale(self) -> None:
        if self.picture is not None:
            ScaleAction(self, self.picture.wanted.replicas).begin()

    def action_look(self) -> None:
        self._wake.set()

    def action_leave(self) -> None:
        self._ended.set()
        self._wake.set()
        self.exit(0)


@contextmanager
def _leaving_on(*numbers: signal.Signals, app: WatchApp) -> Generator[None]:
    """Let signals end the app as `q` does, so that the terminal is restored."""

    def hear(*_: object) -> None:
        if not app.is_running:
            raise SystemExit(0)
        leave = partial(app.call_from_thread, app.action_leave)  # waits for the loop, which this thread runs
        threading.Thread(target=leave, daemon=True).start()

    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_app(looks: RunLooks) -> int:
    """Show the screen until the user quits; return the exit code."""
    for name in ("COLUMNS", "LINES"):  # a shell or `docker exec -e` sets these; textual would never follow a resize
        os.environ.pop(name, None)
    app = WatchApp(looks)
    with _leaving_on(signal.SIGTERM, signal.SIGHUP, app=app):
        code = app.run() or 0
    if threading.active_count() > 1:  # a request without an answer would delay the exit for a minute
        sys.stdout.flush()
        os._exit(code)
    return code
