"""The command line: what it says, how fast, and that nothing it answers needs torch."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
import tomllib
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest

from diloco.run.config import load_config
from diloco.run.founding import open_run
from diloco.run.record import Run
from diloco.runlog.reader import read_report
from diloco.views.overview import overview
from executors.cli import main as cli
from executors.cli.__main__ import main as entry
from executors.cli.starting import demo
from executors.preflight import run_url
from executors.supervision.lease import Lease
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.stores.open import open_store
from tests.diloco.test_report import killed_and_replaced
from tests.support.command import verbs
from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[2]
VERBS = tuple(verbs())
CONFIG = """
name = "tiny"
[fleet]
replicas = 2
steps = 6
[outer]
sync_every = 6
[inner]
loop = "supervised"
model = "tiny"
data.text = "text.txt"
"""


@pytest.fixture
def config(tmp_path) -> Path:
    (tmp_path / "text.txt").write_text("one two three")
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "run.toml"


@pytest.fixture
def run(config) -> Run:
    """A run with a history, in a folder."""
    founded = open_run(load_config(config), str(config.parent / "run"), SystemClock())
    killed_and_replaced(founded.store)
    return founded


def say(capsys, *argv: object) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in argv])
    return code, *capsys.readouterr()


def complaint(capsys, *argv: object) -> str:
    """The complaint of a mistaken command: exit code 2, one paragraph, no traceback."""
    code, out, err = say(capsys, *argv)
    assert code == 2 and "Traceback" not in err and out == ""
    assert err.startswith(f"diloco {argv[0]}: ") and len(err.strip().splitlines()) == 1
    return err


# -------------------------------------------------------------------- speed


def python(code: str, *argv: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=180, check=True)


QUICK = """
import sys
from executors.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"torch", "trl", "transformers", "torchft", "matplotlib"} & set(sys.modules)
heavy |= {"modal", "huggingface_hub", "submitit", "sky", "grpclib"} & set(sys.modules)
assert not heavy, heavy
"""


def best_of_three(*argv: object) -> float:
    """CPU seconds of the command: what it would take on an idle machine, also when this one is busy."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        python(QUICK, *argv)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(times)


def test_help_answers_at_once_and_without_torch():
    assert best_of_three("--help") <= 0.5


@pytest.mark.quick(3)
@pytest.mark.parametrize("verb", [("status",), ("costs",), ("logs", "r00"), ("scale", "3"), ("drain", "r01")])
def test_what_one_asks_a_run_is_answered_at_once_and_without_torch_or_a_platform(run, verb):
    assert best_of_three(verb[0], run.url, *verb[1:]) <= 1.5


def test_plan_of_a_local_run_needs_no_torch_and_no_platform(config):
    assert best_of_three("plan", config, "--run", config.parent / "run") <= 1.5


def test_help_documents_every_verb_and_exit_code():
    text = python("from executors.cli.main import make_parser; make_parser().print_help()").stdout
    lines, _, more = text.partition("\nmore:\n")
    named = re.findall(r"\w+", more.splitlines()[0])
    shown = re.findall(r"^    ([a-z]+) +\S", lines, re.M)
    assert shown[0] == "init" and sorted([*shown, *named]) == sorted(VERBS)
    assert all(f"\n  {code} " in text for code in ("0", "1", "2", "3", "4", "75", "130"))
    assert "DILOCO_DEBUG" in text


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize("verb", ["status", "stop", "report"])
def test_a_run_that_is_not_there(capsys, tmp_path, verb):
    err = complaint(capsys, verb, tmp_path / "nothing")
    assert "there is no run at" in err and "diloco train CONFIG --run" in err
    assert not (tmp_path / "nothing").exists()


def test_a_folder_of_runs_is_answered_with_their_names(capsys, tmp_path):
    """Before: there is no run, start one."""
    for name in ("first", "second run"):
        (tmp_path / name).mkdir()
        (tmp_path / name / layout.RUN).write_text("{}")
    err = complaint(capsys, "status", tmp_path)
    assert f"{tmp_path}/first" in err and f"'{tmp_path}/second run'" in err and "Name one of them" in err


def test_export_of_a_run_that_is_not_there_is_told_before_torch_is_imported(tmp_path):
    done = python(QUICK, "export", tmp_path / "nothing", "--to", tmp_path / "out")
    assert "there is no run at" in done.stderr


def test_a_store_that_nobody_knows(capsys):
    assert "no store for nowhere://bucket/run" in complaint(capsys, "status", "nowhere://bucket/run")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("s3:/bucket/a", "s3://bucket/a"), ("gs:/", "gs://"), ("hf:buckets/a/b", "hf://buckets/a/b"), ("modal:/x", "modal://x"),
     ("file:/tmp/x", "file:///tmp/x"), ("AZ:/b/x", "az://b/x"), ("s3:/k:SECRET@b/x?secret=SECRET", "s3://b/x"),
     ("s3//bucket/a", "s3://bucket/a"), ("gs;//b", "gs://b"), ("file//tmp/x", "file:///tmp/x")],
)  # fmt: skip
@pytest.mark.parametrize("verb", ["status", "train"])
def test_a_mistyped_url_is_no_folder(capsys, config, monkeypatch, verb, typed, meant):
    """Before: a folder of this machine, `s3:`, was made, and the run trained into it."""
    monkeypatch.chdir(config.parent)
    before = sorted(os.listdir())
    said = complaint(capsys, *((verb, typed) if verb == "status" else (verb, config, "--run", typed)))
    assert f"would be a folder of this machine: did you mean {meant}?" in said and "SECRET" not in said
    assert sorted(os.listdir()) == before


def test_a_folder_that_is_named_like_a_url_with_a_slash_too_few_stays_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.makedirs("s3:/bucket")
    for url in ("s3:/bucket", "./s3:/new", "C:/runs", str(tmp_path / "a:b")):
        open_store(url).put("k", b"v")
        assert open_store(url).get("k") == b"v"


def test_a_run_in_memory_cannot_have_several_processes(capsys, config):
    assert "Use --run" in complaint(capsys, "train", config, "--run", "memory://x")


def test_a_config_that_is_not_there(capsys, tmp_path):
    assert "there is no file" in complaint(capsys, "train", tmp_path / "nix.toml", "--run", tmp_path / "run")


def test_an_unknown_setting_names_the_nearest_one(capsys, config):
    config.write_text(CONFIG.replace("sync_every", "sync_evry"))
    err = complaint(capsys, "train", config, "--run", config.parent / "run")
    assert "outer.sync_evry" in err and "did you mean outer.sync_every?" in err
    assert not (config.parent / "run").exists()


def test_another_mathematics_under_one_url(capsys, run, config):
    config.write_text(CONFIG.replace("sync_every = 6", "sync_every = 8"))
    err = complaint(capsys, "train", config, "--run", run.url)
    assert "outer.sync_every is 6 there, 8 here" in err and "another --run" in err


@pytest.mark.parametrize("verb", ["train", "resume", "scale"])
def test_a_run_whose_first_control_record_is_garbage(capsys, run, config, verb):
    run.store.put(layout.control_key(0), b"{}")
    words = [config, "--run", run.url] if verb == "train" else [run.url, *["3"] * (verb == "scale")]
    err = complaint(capsys, verb, *words)
    assert "control/000000.json is not a control record" in err and "Restore the object" in err


@pytest.mark.parametrize("harm", ["garbage", "gone"])
def test_a_run_without_its_first_control_record_can_be_looked_at_and_stopped(capsys, run, harm):
    """Before: `stop` ended with exit code 2 and no replica was asked to leave; `status` too, or said nothing of it."""
    living = read_control(run.store)
    run.store.delete([layout.control_key(0)])
    if harm == "garbage":
        run.store.put(layout.control_key(0), b"{}")
    code, out, _ = say(capsys, "status", run.url)
    assert code == 0 and "! " in out and "control/000000.json" in out and "Restore the object" in out
    code, out, _ = say(capsys, "stop", run.url, "--grace", "0")
    assert code == 0 and "control/000000.json" in out and "asked every replica to leave" in out
    assert "r00-1" in out and "r01-2" in out, "slots are found by their claims"
    assert read_control(run.store, living).stop, "a replica that began earlier hears it"
    err = complaint(capsys, "resume", run.url)
    assert "control/000000.json" in err and "Restore the object" in err


def test_a_run_whose_run_json_is_garbage_can_be_stopped(capsys, run):
    """Before: exit code 2, and no replica was asked to leave."""
    run.store.put(layout.RUN, b"[[]]")
    code, out, _ = say(capsys, "stop", run.url, "--grace", "0")
    assert code == 0 and "asked every replica to leave" in out and read_control(run.store).stop


def test_a_run_whose_run_json_is_gone(capsys, run, config):
    run.store.delete([layout.RUN])
    err = complaint(capsys, "train", config, "--run", run.url)
    assert "run.json has vanished, though control/000000.json is there" in err and "use another URL" in err
    assert "run.json has vanished" in complaint(capsys, "plan", config, "--run", run.url)  # before: `train` alone
    assert run.store.get(layout.RUN) is None


def test_a_replica_refuses_to_join_with_exit_code_2_when_the_quorum_is_lost(run):
    """Seen at decbfac: exit code 2 and "expected a control, found b'{}'", without which object or what to do."""
    run.store.put(layout.control_key(0), b"{}")
    joins = [sys.executable, "-m", "diloco.replica", run.url, "--slot", "r01"]
    done = subprocess.run(joins, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2, done.stderr
    assert "control/000000.json is not a control record" in done.stderr and "Restore the object" in done.stderr


def test_a_folder_that_cannot_be_written(capsys, config):
    (config.parent / "file").write_text("")
    err = complaint(capsys, "train", config, "--run", config.parent / "file" / "run")
    assert "a file where a folder belongs" in err and "another one" in err
    assert len(err.splitlines()) == 1
    (config.parent / "link").symlink_to("/away/disk")
    for folder in ("link", "link/run"):  # before: "File exists"
        err = complaint(capsys, "train", config, "--run", config.parent / folder)
        assert f"{config.parent / 'link'} is a link to /away/disk, which is not there. Mount or make that" in err
    said = complaint(capsys, "status", config)  # before: the advice to remove the config
    assert f"{config} is a file where a folder belongs. A run is a folder or a URL" in said and "Remove" not in said
    assert f"{config} is a file where a folder belongs. A run is a folder or a URL" in complaint(
        capsys, "status", config
    )


@pytest.mark.parametrize("wish", ["--replicas", "--steps", "--min-replicas"])
def test_desired_states_are_whole_numbers(capsys, config, wish):
    with pytest.raises(SystemExit) as left:
        cli.main(["train", str(config), "--run", "x", wish, "0"])
    assert left.value.code == 2 and "'0' must be a whole number of at least 1" in capsys.readouterr().err


def test_debugging_shows_the_traceback(monkeypatch, tmp_path):
    monkeypatch.setenv("DILOCO_DEBUG", "1")
    with pytest.raises(ValueError, match="there is no run at"):
        cli.main(["status", str(tmp_path)])


def test_a_defect_keeps_its_traceback(monkeypatch, run):
    monkeypatch.setattr("diloco.runlog.reader.Reader.refresh", lambda reader: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["status", run.url])


# -------------------------------------------------------------------- answers


def test_status(capsys, run):
    code, out, _ = say(capsys, "status", run.url)
    assert code == 0 and "tiny  outer step 6 of 6" in out and "r01-1     killed at" in out
    assert out.strip().endswith("done")


def test_status_for_programs(capsys, run):
    code, out, _ = say(capsys, "status", run.url, "--json")
    told = json.loads(out)
    assert code == 0 and told["outer_step"] == 6 and told["done"] and told["supervisor"] is None
    assert [x["how"] for x in told["sessions"]] == ["done", "killed", "running"]


def test_report_writes_into_the_runs_folder(capsys, run):
    code, out, _ = say(capsys, "report", run.url)
    folder = Path(run.url.removeprefix("file://"))
    assert code == 0 and "6 of 6 outer steps" in out
    assert (folder / "report.html").exists() and not (folder / "report.png").exists()
    code, out, _ = say(capsys, "report", run.url, "--png")
    assert code == 0 and "report.png" in out and (folder / "report.png").exists()


def test_report_into_what_is_no_folder_names_another(capsys, run, tmp_path):
    (tmp_path / "page.html").write_text("mine")
    code, _, err = say(capsys, "report", run.url, "--to", str(tmp_path / "page.html"))
    assert code == 2 and "File exists. Name another folder: --to FOLDER" in err and "Errno" not in err
    assert (tmp_path / "page.html").read_text() == "mine"


@pytest.mark.parametrize("verb", ["export", "eval"])
def test_a_step_below_zero_is_a_slip(capsys, run, tmp_path, verb):
    """It said that the step cannot be exported any more."""
    with pytest.raises(SystemExit) as slip:
        say(capsys, verb, run.url, "--step", "-1", *(["--to", str(tmp_path / "out")] * (verb == "export")))
    assert slip.value.code == 2 and "must be a whole number of at least 0" in capsys.readouterr().err


def records_of(run) -> dict[str, bytes]:
    return {key: run.store.get(key) for key in run.store.list(layout.CONTROLS)}


def test_stop_of_a_run_that_is_finished_and_quiet_changes_nothing(capsys, run):
    before = records_of(run)
    code, out, _ = say(capsys, "stop", run.url, "--grace", "0")
    assert code == 0 and "the run is finished and no replica sends a heartbeat" in out and "r01-2" in out
    assert "no replica runs any more, and all outer steps are committed" in out
    assert records_of(run) == before


@pytest.mark.parametrize(
    "verb",
    [["scale", "5"], ["drain", "r01"], ["resume"], pytest.param(["resume", "--replicas", "5"], marks=pytest.mark.slow)],
)
def test_whatever_is_wished_of_a_finished_run_it_says_so_and_nothing_changes(capsys, run, verb):
    before = records_of(run)
    code, out, err = say(capsys, verb[0], run.url, *verb[1:])
    assert code == 0 and "the run is finished, all 6 outer steps are committed; nothing was changed" in out + err
    assert f"diloco resume {run.url} --steps 12" in out + err
    assert records_of(run) == before


def test_train_on_a_finished_run_changes_nothing(capsys, run, config):
    before = records_of(run)
    code, _, err = say(capsys, "train", config, "--run", run.url, "--replicas", "5", "--steps", "6")
    assert code == 0 and "the run is finished" in err and records_of(run) == before


@pytest.mark.parametrize("verb", ["train", "plan"])
def test_actors_of_a_run_that_keeps_no_rollouts_are_refused_before_it_is_touched(capsys, tmp_path, verb):
    """The config of the command would keep them; the run's own settings stay."""
    (tmp_path / "run.toml").write_text('[inner]\nmodel = "toolworld"\n[fleet]\nsteps = 6\n')
    config = load_config(tmp_path / "run.toml", ["fleet.record_rollouts=false"])
    run = open_run(config, str(tmp_path / "run"), SystemClock())
    before = records_of(run)
    said = complaint(capsys, verb, tmp_path / "run.toml", "--run", run.url, "--actors", "2", "--steps", "9")
    assert "was launched without fleet.record_rollouts" in said
    assert records_of(run) == before


def test_a_slot_that_was_never_claimed_does_not_start_for_ever(capsys, run):
    write_control(run.store, SystemClock(), replicas=4)
    _, out, _ = say(capsys, "status", run.url)
    assert "starting" not in out and "r02       never started" in out and "r03       never started" in out
    code, _, err = say(capsys, "watch", run.url)
    assert code == 0 and "starting" not in err and f"opening {run.url}" in err, "a slow bucket shows nothing for long"
    seen = overview(read_report(run.store), time.time())
    assert {row.slot for row in seen.rows} == {"r00", "r01"}


def test_fewer_steps_than_are_committed_are_refused_with_the_numbers(capsys, run, config):
    before = records_of(run)
    said = complaint(capsys, "resume", run.url, "--steps", "4")
    assert "6 outer steps are committed already, and steps = 4 asks for fewer" in said and "--steps 10" in said
    assert "6 outer steps are committed" in complaint(capsys, "train", config, "--run", run.url, "--steps", "4")
    assert records_of(run) == before


def test_what_this_user_may_not_read_is_told_so(capsys, run, monkeypatch):
    """Before: "r00 has not been launched yet" for another user's logs, and a bare "[Errno 13] Permission denied"."""

    scan = os.scandir

    def closed(path="."):
        if not str(path).endswith(("processes", "runs/x")):
            return scan(path)
        raise PermissionError(kind, os.strerror(kind), str(path))

    kind = errno.EACCES
    with monkeypatch.context() as another:
        another.setattr(os, "scandir", closed)
        err = complaint(capsys, "logs", run.url, "r00")
    assert "processes: permission denied. Use the account that owns it" in err and "launched" not in err
    with monkeypatch.context() as another:
        another.setattr(run_url, "shareable_url", closed)
        assert "this user may not open runs/x: permission denied" in complaint(capsys, "resume", "runs/x")
        kind = errno.EPERM
        err = complaint(capsys, "resume", "runs/x")
        assert "runs/x: operation not permitted. This machine forbids it" in err and "account that owns" not in err


def test_logs_without_a_slot_names_the_slots(capsys, run):
    assert "which log? This run has logs of r00, r01 and, if it is" in complaint(capsys, "logs", run.url)
    write_control(run.store, SystemClock(), steps=12, actors=1)  # before: an actor's log was not named
    assert "which log? This run has logs of r00, r01, a00 and, if it is" in complaint(capsys, "logs", run.url)


def test_a_supervised_run_is_not_started_twice(capsys, run, config):
    lease = Lease.take(run.store, SystemClock())
    code, out, _ = say(capsys, "train", config, "--run", run.url, "--detach", "--steps", "9")
    assert code == 0 and f"process {os.getpid()} on" in out and "supervises this run already" in out
    assert read_control(run.store).steps == 9  # but it has heard the wishes
    lease.beat("left")


def test_train_looks_on_when_somebody_else_supervises(capsys, run, config):
    lease = Lease.take(run.store, SystemClock())
    beating = threading.Event()

    def beat() -> None:
        while not beating.wait(0.05):
            lease.beat("watching")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        code, out, err = say(capsys, "train", config, "--run", run.url)
    finally:
        beating.set()
        thread.join()
    assert code == 0 and "supervises this run already; watching it" in err and "steps_before=6 of=6" in out


def test_a_finished_demo_is_left_alone(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = demo._open_demo_run(None)
    assert first.url.endswith("runs/demo") and not first.resumed
    assert demo._open_demo_run(None).resumed  # unfinished: the same one goes on
    open_run(load_config("runs/demo/demo.toml"), "runs/demo", SystemClock(), steps=6)
    killed_and_replaced(first.store)
    assert demo._open_demo_run(None).url.endswith("runs/demo-2")


def test_ctrl_c_while_the_command_is_imported_prints_no_traceback(monkeypatch):
    """Before: a traceback in the first .2 s."""

    def find_spec(name: str, *_: object) -> None:
        if name == "executors.cli.main":
            raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "executors.cli.main")
    monkeypatch.setattr(sys, "meta_path", [SimpleNamespace(find_spec=find_spec), *sys.meta_path])
    assert entry() == 130
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts == {"diloco": f"{entry.__module__}:{entry.__name__}"}


def test_a_command_ends_though_a_thread_of_the_users_code_does_not() -> None:
    """Before: `diloco eval` printed its result and did not end."""
    code = (
        "import sys, threading, executors.cli.__main__ as entry, executors.cli.main as cli\n"
        "cli.main = lambda: threading.Thread(target=threading.Event().wait).start() or 3\n"
        "entry.END_S = 0.1\nsys.exit(entry.main())"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 3


@pytest.mark.parametrize(
    ("upper", "lower", "expected"),
    [
        ("", "", ["localhost,127.0.0.1,::1"] * 2),
        ("", ".corp", [".corp,localhost,127.0.0.1,::1"] * 2),
        ("a.corp, localhost", "b.corp", ["a.corp,localhost,127.0.0.1,::1", "b.corp,localhost,127.0.0.1,::1"]),
        ("*", "", ["*", "*"]),
    ],
)
def test_a_proxy_gets_no_request_to_this_machine(upper: str, lower: str, expected: list[str], monkeypatch) -> None:
    """Seen with a proxy of a company and no NO_PROXY: an agent's requests to its endpoint went to the proxy."""
    for name, value in {"NO_PROXY": upper, "no_proxy": lower, "HTTP_PROXY": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with S3Server() as server:
        assert cli.main(["completion", "bash"]) == 0
        assert [os.environ["NO_PROXY"], os.environ["no_proxy"]] == expected
        assert httpx.get(f"{server.endpoint}/-/control").status_code == 200
        with urllib.request.urlopen(f"{server.endpoint}/-/control") as answer:
            assert answer.status == 200


def test_a_run_that_its_limit_ends_is_continued_with_a_higher_one(config, capsys, monkeypatch) -> None:
    """The command that was advised, typed as it stood, ended at once for the same reason."""
    monkeypatch.chdir(config.parent)
    code, _, err = say(capsys, "train", config, "--run", "runs/x", "--no-preflight", "--max-hours", 0.001)
    assert code == 4 and err.splitlines()[-1] == "to continue: diloco resume runs/x --max-hours N", err
