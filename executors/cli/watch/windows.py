"""The windows of `diloco watch`: a text, a question, a number; and an app that draws only printable text.

    TextWindow(source)     title, "reading …" ─▶ the text, or the error            n p: newer page, older page
    AskWindow(question)    y / n                                                   escape: no
    NumberWindow           a number of replicas                                    escape: None
    PlainApp               lines of segments ──Printable──▶ the terminal           textual itself keeps escape codes

Not promised: a text that grows (`diloco logs -f` follows a log), or a visible mark for a character that Printable
removes, because textual has already measured the line.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.containers import Vertical, VerticalScroll
from textual.filter import LineFilter
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from executors.cli.watch.looks import error_words
from inner.printable import printable

T = TypeVar("T")


class Printable(LineFilter):
    """A filter that makes drawn lines printable.  It removes unprintable characters that textual gives no width."""

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
        if not self.is_attached:  # it was closed meanwhile
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
            yield Static(f"{self.question} (enter: go on, escape: leave it)", markup=False)
            yield Input(str(self.number), type="integer", select_on_focus=True)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        number = int(event.value) if event.value.isdigit() else 0
        self.dismiss(number if number > 0 else None)
