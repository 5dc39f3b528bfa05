"""The verbs that start, look and change: what they ask, write into the bucket, and refuse before anything is rented."""

import argparse
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from diloco.process.journal import Journal
from executors.cli import main as cli
from executors.cli import typed
from executors.cli.looking import logs
from executors.cli.starting.verbs import _has_model
from executors.platforms import EXECUTORS
from executors.platforms.base import ExecutorError, Handle, LaunchPlan
from executors.platforms.places import Place, make_executor
from executors.platforms.typed_options import make_with
from executors.preflight import place_faults, quote
from executors.preflight.price_words import price_words
from executors.preflight.run_url import UsageError
from executors.supervision.lease import Lease
from executors.supervision.money.budget import Budget
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.records.records import Claim
from rendezvous.store import put_once
from tests.executors.test_cli import CONFIG, ROOT, complaint, config, run, say  # noqa: F401  (fixtures)
from tests.support.command import asked, verbs
from tests.support.fleet import TEXT

BASH = "/bin/bash"
PAID = ("--executor", "slurm", "--option", "cluster=local", "--option", "usd_per_hour=4")  # submitit's local mode


def outcome(argv: list[object], **environ: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, without a terminal."""
    code = "import sys\nfrom executors.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    command = [sys.executable, "-c", code, *map(str, argv)]
    return subprocess.run(command, input="", capture_output=True, text=True, env=env, timeout=180)


# -------------------------------------------------------------------- words


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("local", {"executor": "local"}),
        ("modal:2", {"executor": "modal", "count": 2}),
        ("modal:2:H100,A100", {"executor": "modal", "count": 2, "gpu": ["H100", "A100"]}),
        ("modal:1:H100:8", {"executor": "modal", "count": 1, "gpu": ["H100:8"]}),
    ],
)
def test_places(text, place):
    assert typed.place(text) == place


@pytest.mark.parametrize("text", ["", ":2", "modal:x", "modal:0", "modal:-1"])
def test_what_is_no_place(text):
    with pytest.raises(argparse.ArgumentTypeError, match="must look like NAME"):
        typed.place(text)


def test_times_amounts_and_options():
    assert [typed.duration(t) for t in ("90", "90m", "1.5h", "1d")] == [90.0, 5400.0, 5400.0, 86400.0]
    assert [typed.amount(t) for t in ("0", "12.50", "$3")] == [0.0, 12.5, 3.0]
    assert [typed.option(t) for t in ("a=gpu", "n=4", "x=[1]")] == [("a", "gpu"), ("n", 4), ("x", [1])]
    with pytest.raises(argparse.ArgumentTypeError, match="is not an amount"):
        typed.amount("9" * 400)  # as a float it is infinite


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--timeout", "soon"], "'soon' is not a time; write e.g. 90m, 6h or 1d"),
        (["--timeout", "0h"], "'0h' is not a time"),
        (["--max-usd", "-3"], "'-3' is not an amount"),
        (["--max-usd", "lots"], "'lots' is not an amount; write e.g. 25"),
        (["--option", "partition"], "'partition' must look like KEY=VALUE"),
        (["--place", "modal:none"], "'modal:none' must look like NAME"),
    ],
)
def test_words_that_mean_nothing(capsys, argv, told):
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", "run.toml", "--run", "x", *(f"{argv[0]}={argv[1]}",)])
    assert left.value.code == 2 and told in capsys.readouterr().err


# -------------------------------------------------------------------- where


def wanted(*argv: str) -> tuple[Place, ...]:
    return quote.wanted_places(asked("plan", "c", "--run", "r", *argv).places)


def test_one_executor_with_what_belongs_to_it():
    (place,) = wanted("--executor", "modal", "--gpu", "H100", "--gpu", "A100", "--secret", "aws", "--timeout", "6h")
    assert place == Place("modal", 0, ("H100", "A100"), 21600.0, ("aws",))


def test_a_mixed_fleet_with_options_for_one_of_its_places():
    modal, local = wanted("--place", "modal:2:H100", "--place", "local", "--option", "modal.region=eu", "--timeout=1h")
    assert (modal.executor, modal.count, modal.gpu, modal.options) == ("modal", 2, ("H100",), {"region": "eu"})
    assert (local.executor, local.options, local.timeout_s) == ("local", {}, 3600.0)
    assert quote.replicas_in((modal, local)) is None  # the last one takes the rest
    assert quote.replicas_in((modal, Place("local", 1))) == 3


def test_each_place_has_its_own_secrets():
    named = ("--secret", "modal.aws", "--secret", "hf-jobs.AWS_REGION", "--secret", "both", "--secret", "my.own")
    modal, hub, local = wanted("--place", "modal:1", "--place", "hf-jobs:1", "--place", "local", *named)
    assert modal.secrets == ("aws", "both", "my.own") and hub.secrets == ("AWS_REGION", "both", "my.own")
    assert local.secrets == ("both", "my.own")
    with pytest.raises(UsageError, match="none of the places is 'sky'"):
        wanted("--place", "modal:1", "--place", "local", "--secret", "sky.aws")


@pytest.mark.parametrize(
    ("executor", "words", "told"),
    [
        ("hf-jobs", ("--option", "env=abc"), "--option env=abc"),
        ("hf-jobs", ("--option", 'env={"A": 1}'), "its env"),
        ("hf-jobs", ("--option", "timeout_s=abc"), "not a number"),
        ("hf-jobs", ("--option", "timeout_s=-5"), "-5, not in 0"),
        ("hf-jobs", ("--option", "secrets=null"), "--option secrets=None"),
        ("modal", ("--option", "gpu=3"), "--option gpu=3"),
        ("local", ("--timeout", "99999d"), "its timeout_s"),
    ],
)
def test_a_value_that_a_place_cannot_have_is_a_mistake_in_the_command(executor, words, told):
    """Before: a traceback, or a control record that each reader refused."""
    with pytest.raises(UsageError, match=f"{executor} cannot have these settings") as raised:
        wanted("--executor", executor, *words)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    "place",
    [
        Place("modal", options={"cores": "abc"}),
        Place("modal", options={"memory_mib": [1]}),
        Place("local", options={"cores": "two"}),
        Place("slurm", options={"usd_per_hour": "a lot"}),
        Place("slurm", options={"usd_per_hour": -2}),
        Place("sky", options={"pip": 3}),
        Place("modal", options={"prices": {"T4": "0.5"}}),
        Place("modal", options={"prices": {"T4": -1}}),
        Place("modal", options={"region": 5}),
        Place("modal", options={"vllm": "yes"}),
        Place("hf-jobs", options={"pip": [1]}),
        Place("local", options={"folder": 5}),
    ],
)
def test_an_option_of_the_wrong_type_or_below_0_is_named(place):
    """Before: prices below 0 and texts were accepted; a budget counted with them, or `plan` ended with a traceback."""
    ((key, value),) = place.options.items()
    with pytest.raises(ExecutorError) as raised:
        make_executor(place)
    assert f"{place.executor} cannot use --option {key}={value!r}: " in str(raised.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"cores": 0}, "more than 0 of both"),
        ({"memory_mib": 0}, "more than 0 of both"),
        ({"prices": {"T9": 1.0}}, "Modal has no GPU called 'T9'"),
        ({"clock": 5}, "modal takes no option clock; it takes image, "),
    ],
)
def test_an_option_that_modal_cannot_have_is_a_mistake_in_the_command(options, told):
    """Before: `plan` ended with 0. A price of an unknown GPU corrected nothing."""
    with pytest.raises(ExecutorError, match=told):
        make_executor(Place("modal", options=options))
    make_executor(Place("modal", options={"prices": {"t4": 1}, "pip": "einops", "gpu": ["T4"]}))


@pytest.mark.parametrize("typed", ["", "modal."])
def test_a_secret_without_a_name_is_a_mistake_in_the_command(typed, capsys):
    """Before: `--secret "$UNSET"` was a secret that `plan` did not look for."""
    with pytest.raises(SystemExit, match="2"):
        asked("plan", "c", "--run", "r", "--executor", "modal", "--secret", typed)
    assert "names no secret" in capsys.readouterr().err


def test_a_nan_is_no_value_of_an_option():
    """Before: "its options is nan", with --timeout in place of the option."""
    (place,) = wanted("--executor", "modal", "--option", 'prices={"T4": NaN}')
    assert place.options == {"prices": '{"T4": NaN}'}
    with pytest.raises(UsageError, match=r"--option prices=inf\)"):
        wanted("--executor", "modal", "--option", "prices=1e400")


def test_an_option_that_a_platform_needs_is_named(monkeypatch):
    """Before: the TypeError's traceback."""
    monkeypatch.setitem(EXECUTORS, "toy", "examples.toy_platform.toy:ToyExecutor")
    with pytest.raises(ExecutorError, match=r"^toy needs --option folder=…\. Add it to the command$"):
        make_executor(Place("toy"))


def test_the_fault_of_a_platform_s_module_is_not_said_to_be_the_user_s():
    def broken():
        raise TypeError("in its own code")

    with pytest.raises(TypeError, match="in its own code"):
        make_with(broken, {}, "toy", {})


def test_an_option_of_a_place_is_found_by_its_checks():
    """Before: `--option modal.secrets=…` reached the executor, and pre-flight said that no secret was named."""
    options = ('modal.secrets=["aws"]', "modal.gpu=H100:8", "hf-jobs.secrets=A,B", 'hf-jobs.env={"C": "d"}')
    places = ("--place", "modal:1", "--place", "hf-jobs:1", "--place", "local")
    modal, hub, local = wanted(*places, *(word for text in options for word in ("--option", text)))
    assert (modal.secrets, modal.gpu, modal.options) == (("aws",), ("H100:8",), {})
    assert (hub.secrets, hub.env, hub.options) == (("A", "B"), {"C": "d"}, {})
    assert modal.devices == 8 and not place_faults.keys_missing("s3://b/r", modal, {})
    words = place_faults.keys_missing("s3://b/r", hub, {}, several=True)
    assert words.endswith("add --secret hf-jobs.AWS_ACCESS_KEY_ID --secret hf-jobs.AWS_SECRET_ACCESS_KEY")
    assert local.secrets == ()


def test_a_run_keeps_its_places_and_they_can_be_refined():
    before = [Place("modal", 0, ("H100",)).to_dict()]
    assert quote.wanted_places(asked("resume", "r", "--timeout", "2h").places, before) == (
        Place("modal", 0, ("H100",), 7200.0),
    )
    assert quote.wanted_places(asked("resume", "r").places, before) == (Place("modal", 0, ("H100",)),)


def test_hardware_as_an_option_is_the_places_gpu():
    """Before: four GPUs were one, and the fleet started before the model was there."""
    typed = asked("resume", "r", "--executor", "hf-jobs", "--option", "hardware=a10g-largex4").places
    (place,) = quote.wanted_places(typed, [])
    assert place.gpu == ("a10g-largex4",) and place.devices == 4 and "hardware" not in place.options


def test_an_unknown_executor_names_those_there_are(capsys, config):  # noqa: F811
    err = complaint(capsys, "plan", config, "--run", config.parent / "run", "--executor", "lambda")
    assert "there is no executor 'lambda'; there are local, modal, hf-jobs, slurm, sky" in err


def test_executor_and_place_together(capsys, config):  # noqa: F811
    err = complaint(capsys, "plan", config, "--run", "x", "--executor", "local", "--place", "local:1")
    assert "use one of them" in err


def test_a_gpu_without_a_place(capsys, config):  # noqa: F811
    assert "add --executor NAME" in complaint(capsys, "plan", config, "--run", "x", "--gpu", "H100")


def test_an_unknown_gpu_is_refused_before_the_run_is_founded(capsys, config):  # noqa: F811
    err = complaint(capsys, "train", config, "--run", config.parent / "run", *PAID, "--gpu", "H9000", "--yes")
    assert "H9000" in err and "there are: none" in err
    assert not (config.parent / "run").exists()


@pytest.mark.quick(3)
@pytest.mark.parametrize("executor", ["modal", "hf-jobs", "sky"])
@pytest.mark.parametrize("verb", ["train", "plan"])
def test_a_folder_is_out_of_reach_for_rented_machines(config, verb, executor):  # noqa: F811
    url = config.parent / "run"
    done = outcome([verb, config, "--run", url, "--executor", executor, "--gpu", "H100"])
    assert done.returncode == 2 and f"replicas on {executor} cannot reach it" in done.stderr
    assert "--run s3://bucket/prefix" in done.stderr and not url.exists()


@pytest.mark.parametrize(
    ("executor", "sdk", "extra"),
    [("slurm", "submitit", "slurm"), ("modal", "modal", "serverless"), ("hf-jobs", "huggingface_hub", "serverless"),
     ("sky", "sky", "sky")],
)  # fmt: skip
def test_an_sdk_that_is_not_installed_is_named_with_its_extra(config, executor, sdk, extra):  # noqa: F811
    url = config.parent / "run" if executor == "slurm" else "s3://bucket/run"
    options = {"cluster": "local"} if executor == "slurm" else {}
    code = (
        "from executors.platforms.places import Place, build_executor\n"
        "from executors.platforms.base import ReplicaSpec\n"
        f"build_executor([Place({executor!r}, options={options!r})])"
        f".launch_replicas([ReplicaSpec({str(url)!r}, 'r00')])"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", f"import sys\nsys.modules[{sdk!r}] = None\n{code}"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=180)
    assert done.returncode == 1 and f"pip install 'serverless-diloco[{extra}]'" in done.stderr.splitlines()[-1]


# -------------------------------------------------------------------- how much


def test_plan_prints_the_price_and_starts_nothing(capsys, config):  # noqa: F811
    url = config.parent / "run"
    code, out, _ = say(capsys, "plan", config, "--run", url, *PAID, "--max-usd", "2")
    assert code == 0 and "$8.00 per hour in all" in out and "ends by itself before $2.00 (0.2 hours" in out
    assert out.strip().endswith("nothing was started") and not url.exists()
    code, out, _ = say(capsys, "plan", config, "--run", url, *PAID, "--replicas", "3", "--json")
    told = json.loads(out)
    assert told["usd_per_hour"] == 12.0 and len([x for x in told["plan"] if x.startswith("r0")]) == 3


def test_a_price_above_max_usd_is_refused_before_the_run_is_founded(capsys, config):  # noqa: F811
    url = config.parent / "run"
    err = complaint(capsys, "train", config, "--run", url, *PAID, "--max-usd", "0.05", "--yes")
    assert "would pass max_usd = 0.05" in err and "raise --max-usd" in err and not url.exists()


def test_a_price_that_nobody_knows_is_refused_unless_told_so(capsys, config):  # noqa: F811
    unknown = ("--executor", "slurm", "--option", "cluster=local", "--option", "usd_per_hour=null")
    err = complaint(capsys, "plan", config, "--run", config.parent / "run", *unknown)
    assert "--allow-unknown-price" in err
    code, out, _ = say(capsys, "plan", config, "--run", config.parent / "run", *unknown, "--allow-unknown-price")
    assert code == 0 and "is unknown" in out


def test_what_costs_money_wants_a_yes_from_a_person(config):  # noqa: F811
    url = config.parent / "run"
    done = outcome(["train", config, "--run", url, *PAID])
    assert done.returncode == 2 and "stdin is not a terminal" in done.stderr and "--yes" in done.stderr
    assert "$8.00 per hour in all; no limit (--max-usd X sets one)" in done.stderr and not url.exists()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("typed", "agreed"), [("y\n", True), ("YES\n", True), ("\n", False), ("no\n", False)])
def test_the_question(capsys, typed, agreed):
    asked = quote.Quote((Place(),), LaunchPlan((), 8.0), Budget())
    assert quote.ask_agreement(asked, False, Terminal(typed)) is agreed
    assert "start it? [y/N]" in capsys.readouterr().err


def test_what_costs_nothing_is_not_asked_for():
    assert quote.ask_agreement(quote.Quote((Place(),), LaunchPlan(()), Budget()), False, io.StringIO())


# -------------------------------------------------------------------- into the bucket


def test_places_and_budget_stand_in_the_bucket_for_whoever_supervises(capsys, run, config):  # noqa: F811
    write_control(run.store, SystemClock(), steps=12)
    run.store.put(layout.MODEL_MANIFEST, b"{}")  # nothing is left to be done there
    code, _, err = say(capsys, "train", config, "--run", run.url, *PAID, "--max-usd", "9", "--yes")
    control = read_control(run.store)
    assert code == 0 and "all 6 outer steps are committed" in err
    assert control.max_usd == 9.0 and [p["executor"] for p in control.places] == ["slurm"]
    records = control.records
    say(capsys, "train", config, "--run", run.url, "--yes")  # the same again, without saying where
    assert read_control(run.store).places == control.places and read_control(run.store).records == records


def test_resume_needs_no_config(capsys, run, config):  # noqa: F811
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    write_control(run.store, SystemClock(), stop=True)
    config.unlink()
    code, out, _ = say(capsys, "resume", run.url, "--json")
    assert code == 0 and json.loads(out)["code"] == 0
    assert read_control(run.store).stop, "it is finished, and nothing was changed"


def test_an_export_is_advised_where_there_is_a_model(run):  # noqa: F811
    """Before: also after `diloco launch` of a loop with make_diloco, whose run has no model."""
    assert not _has_model(run)
    run.store.put(layout.MODEL_MANIFEST, b"{}")
    assert _has_model(run)


def test_resume_of_a_run_that_is_not_there(capsys, tmp_path):
    assert "there is no run at" in complaint(capsys, "resume", tmp_path / "nothing")


def test_resume_with_fewer_replicas_than_a_step_needs(capsys, run):  # noqa: F811
    write_control(run.store, SystemClock(), steps=12)
    assert "no outer step could ever be taken" in complaint(capsys, "resume", run.url, "--replicas", "1")


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["--executor", "local", "--option", "devices=2"], 'inner.loop = "supervised" trains in one process'),
        (["--place", "modal:1:H100:8", "--place", "local"], 'inner.loop = "supervised" trains in one process'),
    ],
)
def test_resume_refuses_places_in_which_the_run_cannot_continue(capsys, run, typed, told):  # noqa: F811
    """Before, each replica said so on a rented machine, and the control record kept the places."""
    write_control(run.store, SystemClock(), steps=12)
    records = read_control(run.store).records
    assert told in complaint(capsys, "resume", run.url, *typed)
    assert read_control(run.store).records == records


# -------------------------------------------------------------------- changing


def test_scale_up_and_down(capsys, run):  # noqa: F811
    write_control(run.store, SystemClock(), steps=12)
    code, out, _ = say(capsys, "scale", run.url, "4")
    assert code == 0 and "2 -> 4 replicas" in out and "this run has no supervisor now" in out
    assert read_control(run.store).replicas == 4
    lease = Lease.take(run.store, SystemClock())
    code, out, _ = say(capsys, "scale", run.url, "2", "--json")
    assert code == 0 and json.loads(out) == {"run": run.url, "replicas": 2, "messages": ["4 -> 2 replicas"]}
    lease.beat("left")


def test_scale_to_zero(capsys, run):  # noqa: F811
    with pytest.raises(SystemExit) as left:
        cli.main(["scale", run.url, "0"])
    assert left.value.code == 2 and "to end a run: diloco stop RUN" in capsys.readouterr().err
    assert read_control(run.store).replicas == 2


@pytest.mark.parametrize("words", [("20000",), ("3", "--actors", "20000")])
def test_scale_beyond_what_a_record_may_name(capsys, run, words):  # noqa: F811
    """Before: a traceback after the price was agreed."""
    write_control(run.store, SystemClock(), steps=12)
    told = complaint(capsys, "scale", run.url, *words)
    assert "20000 slots are more than a run can have. Ask for at most 10000" in told


def test_scale_below_what_a_step_needs(capsys, run):  # noqa: F811
    write_control(run.store, SystemClock(), steps=12)
    err = complaint(capsys, "scale", run.url, "1")
    assert "every outer step needs 2 replicas, so a run with 1 could take no step" in err and "--min-replicas 1" in err
    assert say(capsys, "scale", run.url, "1", "--min-replicas", "1")[0] == 0
    assert read_control(run.store).min_replicas == 1


def test_scale_up_for_money_asks(run):  # noqa: F811
    write_control(run.store, SystemClock(), steps=12)
    place = Place("slurm", options={"cluster": "local", "usd_per_hour": 4})
    write_control(run.store, SystemClock(), places=[place.to_dict()], max_usd=50.0)
    done = outcome(["scale", run.url, "3"])
    assert done.returncode == 2 and "--yes" in done.stderr and "$4.00 per hour in all" in done.stderr, "none runs yet"
    assert read_control(run.store).replicas == 2
    assert outcome(["scale", run.url, "3", "--yes"]).returncode == 0
    assert read_control(run.store).replicas == 3


def test_the_price_of_more_replicas_counts_those_that_run():
    """Before: "$4.00 per hour in all … (12.5 hours at this price)", beside two replicas of $4.00 each."""
    said = price_words(4.0, 2.0, Budget(max_usd=50.0), running=8.0)
    assert said == (
        "$2.00 spent so far, $4.00 per hour more, $12.00 in all; ends by itself before $50.00 (4.0 hours at this price)"
    )
    assert "unknown, beside $8.00 per hour now;" in price_words(None, 0.0, Budget(), running=8.0)


def test_a_stop_whose_reader_leaves_stops_all_the_same(tmp_path):
    """Before: `diloco stop RUN | head -1` ended with exit code 0 before it cancelled a rented machine."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom executors.supervision import shutdown\n"
        "def stop_run(store, clock, grace, say):\n"
        "    for _ in range(9): say('asked every replica to leave')\n"
        "    Path(sys.argv[1], 'cancelled').touch()\n    return []\n"
        "shutdown.stop_run = stop_run\nfrom executors.cli.main import main\n"
        "sys.exit(main(['stop', sys.argv[1] + '/run']))"
    )
    (tmp_path / "run" / "control").mkdir(parents=True)
    (tmp_path / "run" / layout.RUN).write_text("{}")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], stdout=writer, stderr=subprocess.PIPE, env=env)
    os.close(writer)
    assert (tmp_path / "cancelled").exists(), done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["export", "RUN", "--to", "m", "--dry-run"], "--public and --dry-run belong to --push"),
        (["export", "RUN", "--to", "m", "--public"], "--public and --dry-run belong to --push"),
        (["watch", "RUN", "--port", "8080"], "belong to the page that --web serves"),
        (["watch", "RUN", "--bind", "0.0.0.0"], "belong to the page that --web serves"),
        (["stop", "--all", "--executor", "modal", "--purge"], "--purge and --grace belong to `diloco stop RUN`"),
        (["stop", "RUN", "--option", "namespace=me"], "--option belongs to --all"),
        (["stop", "--all", "--executor", "modal", "--grace", "60"], "--purge and --grace belong to `diloco stop RUN`"),
    ],
)
def test_an_option_without_the_one_that_it_belongs_to(capsys, run, words, told, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    assert told in complaint(capsys, *[run.url if word == "RUN" else word for word in words])
    assert not (tmp_path / "m").exists()


def test_drain(capsys, run):  # noqa: F811
    write_control(run.store, SystemClock(), steps=12)
    code, out, _ = say(capsys, "drain", run.url, "r01")
    assert code == 0 and "r01 ends its inner step, offers its work and leaves" in out
    assert "warning: every outer step needs min_replicas = 2 replicas, and 1 will be left" in out
    assert read_control(run.store).drains == {"r01"}
    assert "resume" not in out.splitlines()[-1], "before: it would carry out the drain, which it undoes"
    write_control(run.store, SystemClock(), stop=True)
    code, out, _ = say(capsys, "drain", run.url, "r00")
    assert code == 0 and "was asked to stop, so r00 leaves as all others do; nothing was changed" in out
    assert read_control(run.store).drains == {"r01"}


def test_a_drain_without_the_first_control_record_names_the_record(capsys, run):  # noqa: F811
    """Before: "there is no slot 'r01' in this run; there are "."""
    run.store.delete([layout.control_key(0)])
    told = complaint(capsys, "drain", run.url, "r01")
    assert f"{layout.control_key(0)} has vanished, though steps are committed" in told


@pytest.mark.parametrize("verb", ["drain", "logs"])
def test_a_slot_that_does_not_exist(capsys, run, verb):  # noqa: F811
    err = complaint(capsys, verb, run.url, "r07")
    assert "there is no slot 'r07' in this run; there are r00, r01" in err
    assert not read_control(run.store).drains


# -------------------------------------------------------------------- looking


def test_logs_of_a_slot_that_was_not_launched_yet(capsys, run):  # noqa: F811
    write_control(run.store, SystemClock(), replicas=3)
    assert "r02 has not been launched yet" in complaint(capsys, "logs", run.url, "r02")


def test_the_log_of_a_slot_that_ran_elsewhere_is_told_by_its_session(capsys, run):  # noqa: F811
    """Before: "r00 has not been launched yet", on another machine than the one of its processes."""
    claim = Claim("r00", 2, "n", 1.0, host="their-laptop~1f", pid=5)
    put_once(run.store, SystemClock(), layout.claim_key("r00", 2), claim.encode())
    said = complaint(capsys, "logs", run.url, "r00")
    assert "the user who started it has it on their-laptop" in said and f"diloco logs {run.url} r00-2" in said


@pytest.mark.parametrize("spelled", ["file://", ""])
def test_a_platform_is_asked_for_logs_by_the_url_of_its_launches(capsys, run, monkeypatch, spelled):  # noqa: F811
    """Before: by the path as it was typed, so a platform that compares URLs found no launch."""
    url = run.store.url
    found = {url: [Handle(url, "r00", 1, "toy")]}
    toy = SimpleNamespace(find=lambda run: found.get(run, []), logs=lambda *_: ["hello"], follow=list, close=str)
    monkeypatch.setattr(logs, "build_executor", lambda *_: toy)
    code, out, _ = say(capsys, "logs", spelled + url.removeprefix("file://"), "r00")
    assert (code, out) == (0, "hello\n")


def test_the_log_of_a_detached_supervisor(capsys, run):  # noqa: F811
    folder = Path(run.url.removeprefix("file://")) / "processes"
    assert "no detached supervisor" in complaint(capsys, "logs", run.url, "supervisor")
    folder.mkdir()
    (folder / "supervisor.log").write_text("one\ntwo\nthree\n")
    assert say(capsys, "logs", run.url, "supervisor", "--tail", "2")[1] == "two\nthree\n"
    assert say(capsys, "logs", run.url, "supervisor", "-f")[1] == "one\ntwo\nthree\n"  # it has ended
    code, out, _ = say(capsys, "logs", run.url, "supervisor", "--json")
    assert code == 0 and json.loads(out)["lines"] == ["one", "two", "three"]


def test_costs(capsys, run):  # noqa: F811
    clock = SystemClock()
    journal = Journal(run.store, clock, "supervisor", 1)
    began = clock.wall() - 3600
    journal.emit("launched", slot="r00", attempt=1, executor="modal", usd_per_hour=3.0, launched_at=began)
    journal.emit("lost", slot="r00", attempt=1)
    journal.emit("launched", slot="r01", attempt=1, executor="local", usd_per_hour=0.0, launched_at=began)
    journal.flush()
    write_control(run.store, clock, max_usd=20.0)
    code, out, _ = say(capsys, "costs", run.url)
    assert code == 0 and "$3.00 of $20.00 so far, $0.00 per hour now; 6 outer steps, $0.50 each" in out
    assert any(line.split() == ["r00", "modal", "1", "1.00", "3.00"] for line in out.splitlines())
    told = json.loads(say(capsys, "costs", run.url, "--json")[1])
    assert round(told["usd"], 2) == 3.0 and told["per_executor"]["local"] == 0.0 and told["max_usd"] == 20.0
    status = json.loads(say(capsys, "status", run.url, "--json")[1])
    assert round(status["usd"], 2) == 3.0 and status["max_usd"] == 20.0
    assert "$3.00 of $20.00 so far" in say(capsys, "status", run.url)[1]


def test_every_verb_speaks_json():
    assert all("--json" in verb._option_string_actions for verb in verbs().values())


def test_json_of_stop_report_and_objectives(capsys, run):  # noqa: F811
    told = json.loads(say(capsys, "stop", run.url, "--grace", "0", "--json")[1])
    assert told["live"] == [] and {e["name"] for e in told["ends"]} >= {"r00-1", "r01-2"}
    assert Path(json.loads(say(capsys, "report", run.url, "--json")[1])["page"]).exists()
    assert "grpo" in json.loads(say(capsys, "objectives", "--json")[1])


# -------------------------------------------------------------------- all of it, with real replicas


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_runs_whole_life_from_other_processes(config, tmp_path):  # noqa: F811
    (tmp_path / "text.txt").write_text(TEXT)
    config.write_text(CONFIG.replace("steps = 6", "steps = 2000"))
    url, environ = tmp_path / "run", {"OMP_NUM_THREADS": "1"}
    started = outcome(["train", config, "--run", url, "--detach", "--json"], **environ)
    assert started.returncode == 0 and json.loads(started.stdout)["started"], started.stderr
    try:
        wait_until(url, lambda told: told["outer_step"] >= 2)
        assert told_by("logs", url, "r00")["handle"]["slot"] == "r00"
        assert told_by("scale", url, 3)["messages"] == ["2 -> 3 replicas"]
        wait_until(url, lambda told: any(x["slot"] == "r02" and x["counted_in"] for x in told["sessions"]))
        told_by("drain", url, "r01")
        wait_until(url, lambda told: any(x["slot"] == "r01" and x["how"] == "left" for x in told["sessions"]))
    finally:
        stopped = outcome(["stop", url, "--json"])
    assert stopped.returncode == 0 and json.loads(stopped.stdout)["live"] == []
    config.unlink()
    head = told_by("status", url)["outer_step"]
    done = outcome(["resume", url, "--replicas", 2, "--steps", head + 2, "--json"], **environ)
    assert (done.returncode, json.loads(done.stdout)["code"]) == (0, 0), done.stderr
    assert told_by("status", url)["outer_step"] == head + 2 and told_by("costs", url)["usd"] == 0.0


def told_by(*argv: object) -> dict[str, Any]:
    done = outcome([*argv, "--json"])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def wait_until(url: Path, happened: Callable[[dict[str, Any]], bool]) -> None:
    until = time.monotonic() + 120
    while not happened(told := told_by("status", url)):
        assert time.monotonic() < until, told
        time.sleep(0.2)


# -------------------------------------------------------------------- completion


def completed(script: str, *words: str) -> list[str]:
    """The completions that bash would offer for the last word."""
    typed = " ".join(f"'{w}'" for w in words)
    code = f"{script}\nCOMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _diloco; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return subprocess.run([BASH, "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_bash_completes_verbs_and_options(capsys):
    script = say(capsys, "completion", "bash")[1]
    assert completed(script, "diloco", "st") == ["status", "stop"]
    assert completed(script, "diloco", "logs", "runs/x", "--f") == ["--follow"]
    assert set(completed(script, "diloco", "train", "--max")) == {"--max-usd", "--max-hours"}
    assert completed(script, "diloco", "completion", "") == ["bash", "zsh", "fish"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_every_verb_and_option(capsys, shell):
    script = say(capsys, "completion", shell)[1]
    assert all(verb in script for verb in verbs()) and "max-usd" in script


def test_completion_of_an_unknown_shell(capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(["completion", "tcsh"])
    err = capsys.readouterr().err
    assert left.value.code == 2 and "tcsh" in err and "bash" in err and "fish" in err
