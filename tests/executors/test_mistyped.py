"""A mistyped command is told what was wrong with it in one line, with the nearest word; TAB spares the typing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executors.cli import main as cli
from executors.cli.typed import local_path
from executors.platforms import EXECUTORS
from executors.preflight import mistyped
from tests.executors.test_cli import config, run, say  # noqa: F401  (fixtures)
from tests.executors.test_cli_fleet import completed


def refusal(capsys, *argv: object) -> str:
    """The words of argparse: one line, exit code 2, no usage."""
    with pytest.raises(SystemExit) as left:
        cli.main([str(a) for a in argv])
    out, err = capsys.readouterr()
    assert left.value.code == 2 and out == "" and len(err.splitlines()) == 1 and "usage" not in err
    return err.strip()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["trian"], "diloco: there is no VERB 'trian'; did you mean train?"),
        (["help"], "diloco: there is no VERB 'help'; did you mean --help?"),
        (["version"], "diloco: there is no VERB 'version'; did you mean --version?"),
        (["plan", "c", "--run=r", "--exectr"], "diloco plan: there is no option --exectr; did you mean --executor?"),
        (["stop", "r", "--grcae=3"], "diloco stop: there is no option --grcae; did you mean --grace?"),
        (["train", "c"], "diloco train: --run must be given; `diloco train --help` explains it"),
        (["status", "a", "b"], "diloco status: 'b' is one word too many; words with blanks need quotes"),
        (["train", "c", "--run"], "diloco train: --run: expected one argument"),
        (["--run=runs/x", "train", "c"], "diloco train: --run must be given; `diloco train --help` explains it"),
        (["--json", "status", "r"], "diloco status: --json is before the verb; write the verb first, then its "
            "options"),
        (["train", "c", "--run=x", "--run", "y"], "diloco train: --run: given twice, the second time with 'y'; leave "
            "one out"),
        (["completion", "bahs"], "diloco completion: there is no SHELL 'bahs'; did you mean bash?"),
        (["completion", "tcsh"], "diloco completion: there is no SHELL 'tcsh'; there are bash, zsh, fish"),
        (["launch"], "diloco launch: SCRIPT must be given; `diloco launch --help` explains it"),
        ([], "diloco: VERB must be given; `diloco --help` explains it"),
    ],
)  # fmt: skip
def test_one_line_with_the_nearest_word(capsys, argv, said):
    assert refusal(capsys, *argv) == said


@pytest.mark.parametrize(
    "argv",
    [["launch", "--run", "", "a.py"], ["train", "c", "--run=x", "--from="], ["plan", "c", "--gpu", " "],
     ["export", "r", "--to", ""], ["train", "c", "--run=x", "--pip", ""]],
)  # fmt: skip
def test_an_empty_value_is_a_mistake(capsys, argv):
    """Before: `launch --run "$UNSET"` trained in runs/NAME, and `train --from "$UNSET"` began at step 0."""
    assert "the value is empty; is a shell variable unset?" in refusal(capsys, *argv)


@pytest.mark.parametrize("typed", ["plan -- c --run r", "plan c -- --run r"])
def test_an_option_behind_two_dashes_is_told_so(capsys, monkeypatch, typed):
    """Before: "--run is before the verb"."""
    monkeypatch.setattr(sys, "argv", ["diloco", *typed.split()])
    assert "--run is behind `--`, which ends the options" in refusal(capsys, *typed.split())


@pytest.mark.parametrize("typed", ["status -mine", "logs -mine r00", "train c --run -mine", "gc --keep 3 -mine"])
def test_a_name_with_a_leading_dash_is_told_how_to_be_written(capsys, monkeypatch, typed):
    """Before: "RUN must be given" and "expected one argument", though it was typed."""
    monkeypatch.setattr(sys, "argv", ["diloco", *typed.split()])
    assert "; write a name that begins with a dash as ./-mine" in refusal(capsys, *typed.split())


@pytest.mark.parametrize(
    "argv",
    [("export", "r", "--to"), ("report", "r", "--to"), ("traces", "r", "--to"), ("track", "r", "--folder"), ("init",)],
)
def test_what_is_written_here_goes_to_a_path_of_this_machine(capsys, monkeypatch, tmp_path, argv):
    """Before: `--to s3://bucket/x` and `--to file:///x` wrote into new folders, `s3:` and `file:`, where one stood."""
    monkeypatch.chdir(tmp_path)
    assert "'s3://b/x' is no path of this machine. Give one" in refusal(capsys, *argv, "s3://b/x")
    assert "did you mean s3://b/x?" in refusal(capsys, *argv, "s3:/b/x")
    assert not os.listdir() and local_path(f"file://{tmp_path}/a b") == f"{tmp_path}/a b"


def test_an_option_before_the_verb(capsys):
    """Before: only that there is no VERB 'runs/x', and all thirty."""
    said = refusal(capsys, "--run", "runs/x", "train", "c")
    assert said.startswith(
        "diloco: there is no VERB 'runs/x'; the verb comes first, then its options; there are train, "
    )


@pytest.mark.parametrize("typed", [["--run", "X"], ["--run=X"], ["--json", "--run", "X"]])
def test_run_may_be_written_as_trains_option(typed):
    """Before: "there is no option --run", or "RUN must be given", for a word that `diloco train` had taken."""
    args = cli.make_parser(["verify"]).parse_args(["verify", *typed])
    assert args.run == "X" and args.json == ("--json" in typed)


@pytest.mark.parametrize("typed", ["logs r01 --run X", "logs --run=X r01", "logs X r01", "drain r01 --json --run X"])
def test_run_as_an_option_may_be_the_last_word(typed):
    """Before: "there is no run at r01"."""
    args = cli.make_parser([typed.split()[0]]).parse_args(typed.split())
    assert (args.run, args.slot) == ("X", "r01")


@pytest.mark.parametrize("typed", ["init --run X", "check run.toml --run X", "objectives --run=X"])
def test_a_verb_that_takes_no_run_refuses_one(typed, capsys):
    """Before: `init` made a project in the folder of a run."""
    with pytest.raises(SystemExit):
        cli.make_parser([typed.split()[0]]).parse_args(typed.split())
    assert "there is no option --run" in capsys.readouterr().err


def test_options_that_may_be_given_again(capsys, config):  # noqa: F811
    typed = ["plan", config, "--set", "fleet.steps=3", "--set", "fleet.replicas=1"]
    assert say(capsys, *typed)[0] == 0 and "r01" not in say(capsys, *typed)[1]


@pytest.mark.parametrize("grace", ["nan", "inf", "-1", "soon"])
def test_a_grace_that_is_no_number_of_seconds(capsys, grace):
    """Before: nan was taken, and then every comparison with it was false."""
    assert f"{grace!r} is not a number of seconds; write e.g. 20" in refusal(capsys, "stop", "r", f"--grace={grace}")


def test_the_release(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0 and capsys.readouterr().out.startswith("diloco 0.")


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "\n\n"])
def test_an_empty_file_is_no_config(capsys, tmp_path, text):
    (tmp_path / "run.toml").write_text(text)
    code, out, err = say(capsys, "plan", tmp_path / "run.toml", "--run", tmp_path / "run")
    assert code == 2 and out == "" and len(err.splitlines()) == 1
    assert f"{tmp_path / 'run.toml'} is empty" in err and "diloco demo" in err


@pytest.mark.parametrize("verb", ["plan", "train", "status"])
@pytest.mark.parametrize("url", ["http://host/run", "https://host/run"])
def test_a_web_page_is_no_place_for_a_run(capsys, config, verb, url):  # noqa: F811
    words = [url] if verb == "status" else [config, "--run", url]
    code, _, err = say(capsys, verb, *words)
    assert code == 2 and len(err.splitlines()) == 1
    assert f"{url} is a web page's address" in err and "s3://bucket/prefix" in err


def test_nothing_near():
    assert mistyped.nearest_hint("xyz", ["train", "plan"]) == ""


# -------------------------------------------------------------------- TAB


def test_bash_completes_executors_and_places(capsys):
    script = say(capsys, "completion", "bash")[1]
    assert completed(script, "diloco", "train", "c", "--executor", "") == list(EXECUTORS)
    assert completed(script, "diloco", "train", "c", "--executor", "s") == ["slurm", "sky"]
    assert completed(script, "diloco", "plan", "c", "--place", "mo") == ["modal"]
    assert "--version" in completed(script, "diloco", "--")


def test_bash_completes_the_slots_of_a_run(capsys, run, tmp_path, monkeypatch):  # noqa: F811
    """The script asks `diloco completion bash --slots RUN`, so a `diloco` must be on the path."""
    program = tmp_path / "bin" / "diloco"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m executors.cli.main "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    script = say(capsys, "completion", "bash")[1]
    assert completed(script, "diloco", "drain", run.url, "") == ["r00", "r01"]
    assert completed(script, "diloco", "logs", run.url, "r01") == ["r01", "r01-1", "r01-2"]
    assert completed(script, "diloco", "drain", run.url, "--j") == ["--json"]
    assert completed(script, "diloco", "drain", tmp_path / "nothing", "") == []


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_executors_and_slots(capsys, shell):
    script = say(capsys, "completion", shell)[1]
    assert "local modal hf-jobs slurm sky" in script and f"completion {shell} --verb" in script


def test_the_bash_script_is_read_without_an_error(capsys):
    script = say(capsys, "completion", "bash")[1]
    assert subprocess.run(["/bin/bash", "-n"], input=script, text=True, capture_output=True, check=True).stderr == ""
