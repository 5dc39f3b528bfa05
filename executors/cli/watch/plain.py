"""An app of textual that draws plain text alone: the text of a log steers no terminal.

    widgets ─▶ lines of segments ──Printable──▶ the terminal        textual drops five control characters, and no escape

Not promised: a stand-in where a character was taken out: textual has measured the line by then.
"""

from collections.abc import Sequence

from rich.cells import cell_len
from rich.segment import Segment
from textual.app import App
from textual.color import Color
from textual.filter import LineFilter

from inner.printable import printable


class Printable(LineFilter):
    """The filter of a line that is drawn.  A character without width, as textual measures, has none here."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        return [Segment(self._plain(text), style, control) for text, style, control in segments]

    def _plain(self, text: str) -> str:
        pairs = zip(text, printable(text), strict=True)
        return "".join(plain for raw, plain in pairs if plain == raw or cell_len(raw))


PRINTABLE = Printable()


class PlainApp(App[int]):
    """An app whose lines go through one more filter."""

    def get_line_filters(self) -> Sequence[LineFilter]:
        return [*super().get_line_filters(), PRINTABLE]
