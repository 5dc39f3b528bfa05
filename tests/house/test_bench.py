"""`make bench` runs every benchmark that there is, and its page says what failed."""

from pathlib import Path

import pytest

from tests.benchmarks import run_all
from tests.benchmarks.run_all import SUITE, Outcome, main, page


def test_no_benchmark_is_forgotten() -> None:
    there = {path.stem.removeprefix("bench_") for path in Path(run_all.__file__).parent.glob("bench_*.py")}
    assert there == set(SUITE)


def test_the_page_has_a_row_and_the_output_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = [
        Outcome(name="sync", words="1 2", beside="Gloo", load=0.5, seconds=61.2, code=0, text="a\nfp32 1.1 | 0.9"),
        Outcome(name="s3", words="", beside="obstore", load=1.0, seconds=2.0, code=1, text="Traceback"),
    ]
    lines = page("2026-01-02", outcomes).splitlines()
    assert lines[0] == "# Benchmarks, 2026-01-02" and "cores" in lines[2]
    assert "| `sync 1 2` | Gloo | 0.5 | 61 | fp32 1.1 \\| 0.9 |" in lines
    assert "| `s3` | obstore | 1.0 | 2 | **failed (1)** Traceback |" in lines
    assert "fp32 1.1 | 0.9" in lines


def test_what_is_no_benchmark(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sync", "nope"]) == 2
    assert "there is no benchmark nope; there are sync, torchft" in capsys.readouterr().err
