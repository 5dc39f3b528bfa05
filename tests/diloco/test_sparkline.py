"""Curves in a line of text."""

import random

from diloco.runlog.reader import read_report
from diloco.runlog.scope import STATUS
from diloco.runlog.sparkline import sparkline
from diloco.runlog.summary import summary
from executors.cli.looking.status import status_table
from tests.diloco.test_report import Bucket

DICE = random.Random(3)


def test_a_line_has_its_lowest_value_below_and_its_highest_above() -> None:
    assert sparkline([0.0, 0.5, 1.0], 24) == "▁▄█"
    assert sparkline([1.0, 1.0], 24) == "▁▁"
    assert sparkline([None, None], 24) == ""
    assert sparkline([t / 999 for t in range(1000)], 8) == "▁▂▃▄▅▆▇█"


def test_a_run_that_rose_and_stayed_is_drawn_so() -> None:
    rose = [min(1.0, 0.07 + 0.1 * t) - DICE.uniform(0, 0.02) for t in range(200)]
    drawn = sparkline(rose, 20)
    assert drawn[0] in "▂▃▄▅▁" and set(drawn[2:]) <= set("▇█")


def test_noise_makes_no_peaks() -> None:
    for level in (0.05, 0.98):
        drawn = sparkline([level + DICE.gauss(0, 0.01) for _ in range(24)], 24)
        assert set(drawn) <= set("▁▂▃▄▅▆")


def long_run_that_rose() -> Bucket:
    """200 steps: up to .97 in ten of them, then flat."""
    b = Bucket(steps=200, replicas=1)
    b.claim("r00", 1, 0.1)
    for t in range(200):
        b.commit(t, 2.0 + t, [b.offer(t, "r00", 1, min(0.97, 0.07 + 0.09 * t) + 0.01 * (t % 3))])
    return b


def test_status_and_report_draw_the_whole_run_and_not_its_newest_steps() -> None:
    b = long_run_that_rose()
    title = status_table(read_report(b.store, STATUS), width=100)[0]
    assert "0.07 " in title and " 0.98" in title, title
    curve = title.split("0.07 ")[1].split(" ")[0]
    assert len(curve) == 24 and curve[0] in "▁▂▃▄▅▆" and set(curve[1:]) <= set("▇█"), title
    (line,) = [x for x in summary(read_report(b.store)).splitlines() if x.startswith("  mean reward")]
    assert line.count("█") + line.count("▇") >= 40, line
