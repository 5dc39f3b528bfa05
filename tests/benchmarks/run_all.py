"""All benchmarks, one after the other, into one dated page with the machine.

    make bench                          about an hour and a half on two cores
    make bench ONLY="sync codecs"       some of them

    bench_*.py ──▶ its own process, one BLAS thread ──▶ runs/bench/2026-11-23.md: a table, then what each one printed

Run it on a machine that does nothing else: the load before each is in the table.  Ratios are measured inside a
benchmark, beside the peer, so they survive a busy machine better than seconds do.

Not promised: that two pages from two machines can be compared.
"""

import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

FOLDER = Path("runs/bench")
LONGEST_S = 3600
PACKAGES = ("torch", "torchft", "trl", "transformers", "peft", "obstore")
# name -> the words behind it, and what the figures stand beside
SUITE: dict[str, tuple[str, str]] = {
    "sync": ("50 4 7", "Gloo on the same vector"),
    "torchft": ("50 4 5", "stock torchft DiLoCo"),
    "bytes": ("32 4 3", "the least bytes there can be"),
    "codecs": ("", "a copy of the same bytes"),
    "threads": ("48 2 15", "one thread"),
    "s3": ("256 7", "bare obstore"),
    "seal": ("", "a run without a key"),
    "snapshot": ("100 1 3", "a step without a snapshot"),
    "recorded": ("", "the same steps without recording"),
    "actors": ("--minutes 3", "a fleet whose actors are killed 120 times an hour"),
    "overlap": ("", "a sync that training waits for"),
    "scale": ("", "prices of requests"),
    "kill": ("3", "torchft, tuned"),
    "storm": ("10", "the same fleet before the storm"),
    "trainer": ("", "TRL's trainer"),
    "scripts": ("3", "one process with as many samples"),
    "tools": ("", "TRL's tool loop"),
    "topk": ("", "fp32"),
    "elastic": ("", "four equal replicas"),
    "gpu": ("", "plain copies of the same bytes"),
    "memory": ("3", "TRL + PEFT"),
    "views": ("1000 4 50", "a second"),
    "weights": (".venv/models/SmolLM2-135M-Instruct.Q4_1.gguf", "all weights in bf16"),
    "rollout_check": (".venv/models/SmolLM2-135M-Instruct.Q4_1.gguf 24", "honest workers"),
    "web": ("1000 32 50 600", "two seconds, and a request per second"),
    "watch": ("1000 32 50 600", "two seconds, and a request per second"),
}


@dataclass(frozen=True)
class Outcome:
    """load: of the machine, before it began."""

    name: str
    words: str
    beside: str
    load: float
    seconds: float
    code: int
    text: str


def run_one(name: str) -> Outcome:
    words, beside = SUITE[name]
    began, load = time.monotonic(), os.getloadavg()[0]
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-m", f"tests.benchmarks.bench_{name}", *words.split()]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LONGEST_S, env={**os.environ, **threads}, check=False
        )
        code, text = done.returncode, done.stdout + (done.stderr[-2000:] if done.returncode else "")
    except subprocess.TimeoutExpired:
        code, text = 124, f"not done after {LONGEST_S} s"
    return Outcome(name, words, beside, load, time.monotonic() - began, code, text.strip())


def machine() -> str:
    """The machine and the versions, in a line each."""
    cpu = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").is_file():
        names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        cpu = names[0].partition(":")[2].strip() if names else cpu
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES if find_spec(name))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return (
        f"{cpu}, {os.cpu_count()} cores, {memory:.0f} GB, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}\n\n{packages}; commit {commit.stdout.strip()}"
    )


def page(day: str, outcomes: list[Outcome]) -> str:
    return "\n".join(_page_lines(day, outcomes)) + "\n"


def _page_lines(day: str, outcomes: list[Outcome]) -> Iterator[str]:
    yield from (f"# Benchmarks, {day}", "", machine(), "")
    yield from ("| benchmark | beside | load before | s | last line |", "|---|---|---|---|---|")
    for one in outcomes:
        last = (one.text.splitlines() or [""])[-1].strip().replace("|", "\\|")
        failed = "" if one.code == 0 else f"**failed ({one.code})** "
        name = f"{one.name} {one.words}".rstrip()
        yield f"| `{name}` | {one.beside} | {one.load:.1f} | {one.seconds:.0f} | {failed}{last} |"
    for one in outcomes:
        yield from ("", f"## {one.name}", "", "```", one.text, "```")


def main(names: list[str]) -> int:
    if unknown := [name for name in names if name not in SUITE]:
        print(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(SUITE)}", file=sys.stderr)
        return 2
    day = date.today().isoformat()
    path = FOLDER / f"{day}.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    outcomes = list[Outcome]()
    for name in names or list(SUITE):
        print(f"{name} …", flush=True)
        outcomes.append(run_one(name))
        path.write_text(page(day, outcomes))  # what there is, also when the next one is cut off
        print(f"{name}: {outcomes[-1].seconds:.0f} s, code {outcomes[-1].code}", flush=True)
    print(f"wrote {path}")
    return int(any(one.code for one in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
