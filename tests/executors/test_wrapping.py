"""Sentences of `explain`, `verify`, `blame`, `bisect` and `gc` in a terminal and in a pipe."""

import io
from pathlib import Path

import pytest

from executors.cli.answers import fit_lines, wrap_line
from executors.cli.main import main
from tests.support.puppets import PuppetRun

LONG = "  r00-1 at 23:44:33.629: 2 inner steps, 32 samples, 35.0 s since its last outer step; counted with weight 1"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("width", [20, 40, 80])
def test_words_stay_whole_and_in_order_and_the_rest_is_indented(width: int) -> None:
    pieces = wrap_line(LONG, width)
    assert max(map(len, pieces)) <= width
    assert " ".join(piece.strip() for piece in pieces) == LONG.strip()
    assert pieces[0].startswith("  r") and all(piece.startswith("    ") for piece in pieces[1:])


def test_a_command_that_is_too_long_is_not_cut() -> None:
    command = "  diloco explain " + "s3://" + "bucket/" * 20 + " --step 3"
    assert "  s3://" + "bucket/" * 20 in "\n".join(wrap_line(command, 40))
    assert wrap_line("short", 40) == ["short"] and wrap_line("", 40) == [""]


def test_a_pipe_gets_one_line_per_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert fit_lines([LONG, "b"], io.StringIO()) == [LONG, "b"]
    assert len(fit_lines([LONG, "b"], _Terminal())) > 2


def test_explain_fits_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = PuppetRun(tmp_path)
    run.rounds(2)
    for columns, terminal in (("80", _Terminal()), ("60", _Terminal())):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setattr("sys.stdout", terminal)
        assert main(["explain", run.url, "--step", "1"]) == 0
        assert 40 < max(map(len, terminal.getvalue().splitlines())) <= int(columns)
