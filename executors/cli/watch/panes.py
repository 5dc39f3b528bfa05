"""The parts of the screen of `diloco watch` that are drawn from a picture.

    #header #head #rows      a row per session, one of them chosen
    #metrics #chart          a line per curve; the chosen one, drawn larger
    #events                  troubles, messages, the newest events

Not promised: colours; every state is also shown as a word.
"""

import os
from collections.abc import Callable

from rich.text import Text
from textual.screen import Screen
from textual.widgets import OptionList, Static
from textual.widgets.option_list import Option

from diloco.runlog.sessions import BAD_ENDS
from diloco.views.overview import SessionRow, rows_to_show
from executors.cli.watch import words
from executors.cli.watch.looks import Picture, error_words

STYLES = {
    "train": "#5fd75f", "wait": "#d7af5f", "silent": "bold #ff5f5f", "heal": "#5fd7d7", "starting": "#5fd7d7",
}  # fmt: skip
ALARM = "bold #ff5f5f"


class Panes:
    """The parts of the main screen, also while a window is open above it.   screen: returns the main screen."""

    def __init__(self, screen: Callable[[], Screen[object]]) -> None:
        self._screen = screen
        self._drawn: list[str] = []  # names of the rows

    def static(self, name: str) -> Static:
        """Return a part of the main screen, also while a window is open above it."""
        return self._screen().query_one(name, Static)

    @property
    def rows(self) -> OptionList:
        return self._screen().query_one("#rows", OptionList)

    @property
    def chosen(self) -> str:
        """The session in the chosen row: r01-2, or r01 for a slot without a claim."""
        rows = self.rows
        return self._drawn[rows.highlighted] if rows.highlighted is not None and self._drawn else ""

    def forget_rows(self) -> None:
        """Make all rows anew at the next drawing."""
        self._drawn = []

    def draw(self, name: str, act: Callable[[], None]) -> None:
        """Draw a part, or write in its place that the drawing failed; the other parts are still drawn."""
        try:
            act()
        except Exception as error:
            if os.environ.get("DILOCO_DEBUG"):
                raise
            self.static(name).update(f"! this pane cannot be drawn: {error_words(error)}")

    def draw_rows(self, rows: list[SessionRow], width: int, *, everything: bool) -> None:
        self.static("#head").update(words.head_line(width))
        listed = self.rows
        shown = rows if everything else rows_to_show(rows)
        ends = words.last_ends(rows, shown)
        names = [row.name for row in shown]
        if names != self._drawn:
            chosen = self.chosen
            listed.clear_options()
            listed.add_options([Option("", id=name) for name in names])
            listed.highlighted = names.index(chosen) if chosen in names else 0 if names else None
            self._drawn = names
        for row in shown:
            line = _styled(row, words.row_line(row, ends, width - 2), width, chosen=row.name == self.chosen)
            listed.replace_option_prompt(row.name, line)

    def draw_curves(self, picture: Picture, metric: int) -> None:
        curves = picture.seen.series
        metrics, chart = (self.static(name) for name in ("#metrics", "#chart"))
        if not curves:
            metrics.update("no outer step has written its numbers yet" if not picture.partial else "")
            chart.update("")
            return
        chosen = metric % len(curves)
        room = max(20, metrics.size.width)
        lines = [words.metric_line(curve, room, chosen=i == chosen) for i, curve in enumerate(curves)]
        metrics.update("\n".join(lines))
        height = max(3, chart.size.height - 1)  # leave an empty line above the events
        chart.update("\n".join(words.chart_lines(curves[chosen], max(20, chart.size.width), height)))

    def draw_events(self, picture: Picture, trouble: str) -> None:
        events = self.static("#events")
        width = max(20, events.size.width)
        told = [f"! {trouble}"] if trouble else []
        told += [*words.trouble_lines(picture.troubles, width), *picture.messages]
        styled = [Text(line, ALARM if line.startswith("!") else "#d7af5f") for line in told]
        lines = [*styled, *(Text(line) for line in picture.events)][: max(1, events.size.height)]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        events.update(Text("\n").join(lines) if lines else "nothing has happened yet")


def _styled(row: SessionRow, line: str, width: int, *, chosen: bool) -> Text:
    text = Text(line.ljust(width - 2) if chosen else line, "reverse" if chosen else "" if row.is_live else "dim")
    style = STYLES.get(row.phase, "") if row.is_live else ALARM if row.phase in BAD_ENDS and row.is_newest else ""
    text.stylize(style, *words.phase_cell(width))
    return text
