"""The windows of `diloco watch`: a text, a question, a number; the keys that open them; an app that draws only
printable text.

    TextWindow(source)     title, "reading …" ─▶ the text, or the error            n p: newer page, older page
    AskWindow(question)    y / n                                                   escape: no
    NumberWindow           a number of replicas                                    escape: None
    PlainApp               lines of segments ──Printable──▶ the terminal           textual itself keeps escape codes

Each request runs the code of `diloco logs`, `scale` or `drain` in a thread; the screen is updated meanwhile:

    l   log_text        ─▶ lines of the session's log, dead or alive
    o   rollouts_text   ─▶ its newest rollouts, with their rewards, and then its first
    e   events_text     ─▶ troubles and events in full
    d   drain           ask ─▶ control: drain         ┐  read-only credentials: a message, and nothing is written
    s   ScaleAction     number ─▶ price ─▶ ask ─▶ control: replicas  ┘

Not promised: an effect at once, as the supervisor reads the control records every few seconds; a text that grows
(`diloco logs -f` follows a log), or a visible mark for a character that Printable removes, because textual has already
measured the line.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Vertical, VerticalScroll
from textual.filter import LineFilter
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from diloco.run.record import Run
from diloco.runlog.reader import read_report
from diloco.runlog.scope import COSTS
from diloco.views.samples import Sample, session_samples
from executors.cli.changing import scale
from executors.cli.looking import logs
from executors.cli.watch.looks import error_words
from executors.supervision.money.bills import costs
from inner.printable import printable
from rendezvous.agreement.membership import Wanted
from rendezvous.errors import StoreRefused
from rendezvous.stores.cache import cache_of

if TYPE_CHECKING:
    from executors.cli.watch.app import WatchApp

T = TypeVar("T")
TAIL = 500  # lines of a log
ROLLOUTS = 32


class Printable(LineFilter):
    """A filter that makes drawn lines printable: it removes unprintable characters that textual gives no width."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(self._plain(text), style, control) for text, style, control in segments]

    def _plain(self, text: str) -> str:
        pairs = zip(text, printable(text), strict=True)
        return "".join(plain for raw, plain in pairs if plain == raw or cell_len(raw))


PRINTABLE = Printable()


class PlainApp(App[int]):
    """An app with PRINTABLE as an additional line filter."""

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), PRINTABLE]


class TextSource(NamedTuple):
    """A text that must be read.   read(): its pages, the newest first; it may be slow, and may raise."""

    title: str
    read: Callable[[], Sequence[str]]


def in_thread(
    app: App[Any], work: Callable[[], T], done: Callable[[T], object], failed: Callable[[Exception], object]
) -> None:
    """Do the work in a thread that ends with the process; then call `done` or `failed` in the app's thread."""

    def run() -> None:
        try:
            found = work()
        except Exception as error:
            _tell(app, partial(failed, error))
            return
        _tell(app, partial(done, found))

    threading.Thread(target=run, name="watch", daemon=True).start()


def _tell(app: App[Any], call: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the app has ended
        app.call_from_thread(call)


class TextWindow(ModalScreen[None]):
    """A window with pages of a text, which scroll."""

    CSS = """
    TextWindow { align: center middle; }
    TextWindow > Vertical { width: 96%; height: 92%; border: round $primary; background: $background; }
    TextWindow #title { height: 1; text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,l,o,e,ctrl+c", "dismiss(None)", "back"),
        Binding("n", "turn(-1)", "newer"),
        Binding("p", "turn(1)", "older"),
        Binding("g,home", "top", "top", show=False),
        Binding("G,end", "bottom", "end", show=False),
    ]

    def __init__(self, source: TextSource, *, from_end: bool = False) -> None:
        """Make the window.   from_end: show the last lines first."""
        super().__init__()
        self.source = source
        self.from_end = from_end
        self.pages: Sequence[str] = ()
        self.page = 0

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(f"{self.source.title}: reading …", id="title", markup=False)
            with VerticalScroll(id="scroll"):
                yield Static(id="text", markup=False)

    def on_mount(self) -> None:
        self.query_one("#scroll").focus()
        in_thread(self.app, self.source.read, self._fill, lambda error: self._fill([f"! {error_words(error)}"]))

    def _fill(self, pages: Sequence[str]) -> None:
        if not self.is_attached:  # the window was closed meanwhile
            return
        self.pages = pages
        self._draw()
        if self.from_end:
            self.call_after_refresh(self.action_bottom)

    def _draw(self) -> None:
        many = f" ({self.page + 1} of {len(self.pages)}; n newer, p older)" if len(self.pages) > 1 else ""
        self.query_one("#title", Static).update(f"{self.source.title}{many} · escape: back")
        self.query_one("#text", Static).update(self.pages[self.page] if self.pages else "there is nothing")

    def action_turn(self, by: int) -> None:
        self.page = max(0, min(len(self.pages) - 1, self.page + by))
        self._draw()
        self.action_top()

    def action_top(self) -> None:
        self.query_one("#scroll").scroll_home(animate=False)

    def action_bottom(self) -> None:
        self.query_one("#scroll").scroll_end(animate=False)


class AskWindow(ModalScreen[bool]):
    """A window with a yes/no question."""

    CSS = """
    AskWindow { align: center middle; }
    AskWindow > Static { width: 80%; max-width: 100; height: auto; border: round $warning; padding: 1 2; }
    AskWindow > Static { background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("y", "dismiss(True)", "yes"),
        Binding("n,escape,q,ctrl+c", "dismiss(False)", "no"),
    ]

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question

    def compose(self) -> ComposeResult:
        yield Static(f"{self.question}\n\ny: yes    n: no", markup=False)


class NumberWindow(ModalScreen[int | None]):
    """A window that asks for a whole number, 1 or more."""

    CSS = """
    NumberWindow { align: center middle; }
    NumberWindow > Vertical { width: 60; max-width: 96%; height: auto; border: round $warning; padding: 1 2; }
    NumberWindow > Vertical { background: $background; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,ctrl+c", "dismiss(None)", "back")]

    def __init__(self, question: str, number: int) -> None:
        super().__init__()
        self.question = question
        self.number = number

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Static(f"{self.question} (enter: confirm, escape: cancel)", markup=False)
            yield Input(str(self.number), type="integer", select_on_focus=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        number = int(event.value) if event.value.isdigit() else 0
        self.dismiss(number if number > 0 else None)


# -------------------------------------------------------------------- what the keys open and write


def log_text(run: Run, wanted: Wanted, session: str) -> TextSource:
    """Return a session's log.   session: r01-2, or r01 for a slot without a claim."""

    def read() -> list[str]:
        with logs.log_of(run, wanted, session) as log:
            return ["\n".join(log.lines(TAIL)) or "it has printed nothing yet"]

    return TextSource(f"log of {session}", read)


def rollouts_text(run: Run, session: str, flagged: range) -> TextSource:
    """Return a session's rollouts.   flagged: outer steps at which the reward may be hacked."""
    slot, _, generation = session.partition("-")
    none = f"{session} has written no rollouts (fleet.log_rollouts says how many it writes per outer step)"

    def read() -> list[str]:
        found = session_samples(run.store, slot, int(generation or 0), ROLLOUTS)
        return [rollout_words(sample, flagged) for sample in found] or [none]

    return TextSource(f"rollouts of {session}", read)


def rollout_words(sample: Sample, flagged: range) -> str:
    step, _, prompt, completion, reward = sample
    worth = "no reward" if reward is None else f"reward {reward:.4g}"
    flag = " · ! is its reward hacked? (docs/troubles.md)" if step - 1 in flagged else ""
    return f"outer step {step} · {worth}{flag}\n\n[prompt]\n{prompt}\n\n[completion]\n{completion}"


def events_text(lines: Sequence[str]) -> TextSource:
    """Return these lines (troubles, warnings, events) as a text."""
    text = "\n".join(lines) or "nothing has happened yet"
    return TextSource("troubles and events, the newest first", lambda: [text])


def drain(app: "WatchApp", slot: str) -> None:
    """Ask one slot to offer its work and leave, if the user agrees."""
    looks = app.looks

    def answered(agreed: bool | None) -> None:
        if agreed:
            write_in_thread(app, lambda: scale.drain(looks.run, looks.clock, slot))

    question = f"Drain {slot}? It ends its inner step, offers its work and leaves; its slot stays empty."
    app.push_screen(AskWindow(question), answered)


class ScaleAction:
    """The dialog that sets another number of replicas."""

    def __init__(self, app: "WatchApp", replicas: int) -> None:
        self.app = app
        self.replicas = replicas

    def begin(self) -> None:
        self.app.push_screen(NumberWindow(f"{self.replicas} replicas now. How many?", self.replicas), self._named)

    def _named(self, number: int | None) -> None:
        if number is not None and number != self.replicas:
            in_thread(
                self.app,
                lambda: self._price(number),
                lambda lines: self._ask(number, lines),
                lambda error: _notify_refusal(self.app, error),
            )

    def _price(self, number: int) -> list[str]:
        run = self.app.looks.run
        spent = costs(read_report(run.store, COSTS, cache_of(run.store, run.record.nonce)), self.app.looks.clock.wall())
        quote = scale.growth_quote(run, number, None, None, spent)
        return [] if quote is None or quote.free else quote.lines()

    def _ask(self, number: int, lines: Sequence[str]) -> None:
        question = "\n".join([f"From {self.replicas} to {number} replicas?", *lines])
        self.app.push_screen(AskWindow(question), lambda agreed: self._answered(number, agreed))

    def _answered(self, number: int, agreed: bool | None) -> None:
        looks = self.app.looks
        if agreed:
            write_in_thread(self.app, lambda: scale.scale(looks.run, looks.clock, number, None))


def write_in_thread(app: "WatchApp", write: Callable[[], list[str]]) -> None:
    def done(lines: list[str]) -> None:
        app.notify("\n".join(lines), timeout=10, markup=False)
        app.action_look()

    in_thread(app, write, done, lambda error: _notify_refusal(app, error))


def _notify_refusal(app: "WatchApp", error: Exception) -> None:
    app.notify(refusal_words(error), severity="error", timeout=20, markup=False)


def refusal_words(error: Exception) -> str:
    if isinstance(error, StoreRefused):
        return f"nothing was written: these credentials may only read ({error})"
    return f"nothing was written: {error_words(error)}"
