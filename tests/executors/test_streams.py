"""A command whose streams are closed, full, or cannot encode its characters gives its answer, or says what is wrong."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executors.cli.main import main
from executors.platforms.places import Place
from executors.preflight.place_faults import proc_fault
from tests.support.puppets import PuppetRun

ROOT = Path(__file__).parents[2]
DILOCO = f'exec "{sys.executable}" -m executors.cli'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    puppets = PuppetRun(tmp_path_factory.mktemp("streams"), replicas=2)
    puppets.rounds(2)
    return puppets.url


def say(words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Say a command to a shell, with its redirections."""
    command = ["sh", "-c", f"{DILOCO} {words}"]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(command, cwd=ROOT, env={**buffered, **env}, capture_output=True, text=True, timeout=120)


@pytest.mark.quick(2)
@pytest.mark.parametrize("words", ["status {}", "--help", pytest.param("verify {}", marks=pytest.mark.slow)])
@pytest.mark.parametrize("locale", ["ascii", "posix"])
def test_a_stdout_that_cannot_encode_gets_question_marks(run: str, words: str, locale: str) -> None:
    posix = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = say(words.format(run), **(posix if locale == "posix" else {"PYTHONIOENCODING": "ascii"}))
    assert "Traceback" not in done.stderr and done.returncode in (0, 1), done.stderr
    assert done.stdout.isascii() and len(done.stdout) > 40


CLOSINGS = (">&- 2>&-", "<&- >&-", "<&-", ">&-")
CLOSED = [(closed, verb) for verb in ("verify {}", "explain {} --step 1") for closed in CLOSINGS]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("closed", "verb"),
    [
        *((closed, "status {}") for closed in CLOSINGS),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in CLOSED),  # these import torch, to the same end
    ],
)
def test_closed_streams_change_no_exit_code(run: str, closed: str, verb: str) -> None:
    plain, done = say(verb.format(run)), say(f"{verb.format(run)} {closed}")
    assert done.stderr == ("" if "2>" in closed else plain.stderr)
    assert done.returncode == plain.returncode


@pytest.mark.parametrize(("told", "printed"), [("ascii", "?"), ("ascii:backslashreplace", r"\u03b8")])
def test_an_error_handler_that_the_user_names_stays(told: str, printed: str) -> None:
    code = "from diloco.process.output import open_streams\nopen_streams()\nprint('\u03b8')"
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONIOENCODING": told}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=env)
    assert done.stdout == f"{printed}\n", done.stderr


OPENS = """import os, sys
from diloco.process.output import open_streams
open_streams()
assert os.open(os.devnull, os.O_RDONLY) > 2
print(sys.stdin.read() == "", print("lost"), file=sys.stderr)
"""


def test_no_file_of_a_command_gets_the_number_of_a_closed_stream() -> None:
    command = ["sh", "-c", f"exec \"{sys.executable}\" -c '{OPENS}' <&- >&-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "True None\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full")
def test_a_full_output_is_named_and_the_exit_codes_stay(run: str) -> None:
    done = say(f"status {run} > /dev/full")
    assert (done.returncode, done.stderr.count("\n")) == (75, 1)
    assert "no space left for the output of this command (stdout)" in done.stderr
    for helps in ("--help", "status --help", "--version"):  # before: 0 or 120
        for unbuffered in ("", "1"):  # "1", as in many images: argparse dropped the error of its own write
            done = say(f"{helps} > /dev/full", PYTHONUNBUFFERED=unbuffered)
            assert (done.returncode, done.stderr.count("stdout"), done.stderr.count("\n")) == (75, 1, 1)
        assert say(f"{helps} | true").returncode == 0
    assert say("status runs/no-such-run").returncode == say("status runs/no-such-run 2> /dev/full").returncode == 2


def test_children_of_an_optimized_command_keep_their_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: replicas died in an import of transformers, with lines that do not name PYTHONOPTIMIZE."""
    for given, passed_on in (("2", "1"), ("3", "1"), ("1", "1"), ("0", "0")):
        monkeypatch.setenv("PYTHONOPTIMIZE", given)
        with pytest.raises(SystemExit):
            main(["--version"])
        assert os.environ["PYTHONOPTIMIZE"] == passed_on


def test_a_machine_without_proc_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    assert proc_fault(Place("local", 1)) == ""
    monkeypatch.setattr("executors.preflight.place_faults.start_ticks", lambda pid: None)
    assert "/proc is not mounted" in proc_fault(Place("local", 1))
    assert proc_fault(Place("modal", 1)) == ""
