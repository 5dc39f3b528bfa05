"""One spelling for each duration, size and sum of money."""

import ast
from pathlib import Path

import pytest

from diloco.units import byte_size, dollars, duration, rounded

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.0443, "0.044 s"), (0.21, "0.21 s"), (9.49, "9.5 s"), (9.96, "10 s"), (95, "95 s"),
        (119.6, "2 min 00 s"),
        (330, "5 min 30 s"), (750, "12 min"), (3599.6, "1 h 00 min"), (11_000, "3 h 03 min"), (172_799, "2 d 00 h"),
        (270_000, "3 d 03 h"),
        (-1.5, "−1.5 s"),
    ],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"), (512, "512 B"), (999.4, "999 B"), (999.6, "1 kB"), (9_826_000, "9.83 MB"), (999_600_000, "1 GB"),
        (2.2e12, "2.2 TB"), (1.5e15, "1500 TB"),
    ],
)  # fmt: skip
def test_sizes(count: float, words: str) -> None:
    assert byte_size(count) == words


def test_money_below_a_cent_shows_the_first_two_digits_that_tell() -> None:
    assert [dollars(usd) for usd in (12.3, 0.0031, 0.00012345, 0)] == ["$12.30", "$0.0031", "$0.00012", "$0.00"]


def test_no_other_module_of_diloco_or_executors_defines_its_own() -> None:
    """`typed.duration` reads one."""
    names = {"duration", "nice_time", "format_duration", "nice_bytes", "in_bytes", "byte_size", "dollars"}
    found = {
        path.relative_to(ROOT).as_posix(): node.name
        for room in ("diloco", "executors")
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name in names and path.name != "units.py"
    }
    assert found == {"executors/cli/typed.py": "duration"}


def test_a_long_text_keeps_its_beginning_and_its_end() -> None:
    cut = rounded({"error": "a" * 5000 + "z" * 5000, "tail": ["b" * 9000, "\ud800", 3], "rate": 0.5})
    assert cut["error"].startswith("a" * 1000) and cut["error"].endswith("z" * 1000) and len(cut["error"]) < 2010
    assert len(cut["tail"][0]) < 2010 and cut["tail"][1:] == ["?", 3] and cut["rate"] == 0.5
