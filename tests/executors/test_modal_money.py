"""Costs and builds of a launch on Modal, through the real SDK against tests/support/modal_server.py.

Here: one deploy for a whole run and none that is not needed, packages of one's own (`--pip`), limits that follow the
model's size, weights that stay in a Volume, and a container that begins when there is nothing left to do.
"""

# ruff: noqa: F811

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import modal
import pytest

from diloco.process import exitcodes
from diloco.replica import replica
from diloco.replica.replica import too_late
from diloco.run.config import RunConfig
from diloco.run.founding import open_run
from diloco.run.record import read_run
from executors.cli import main as cli
from executors.cli.answers import Answer
from executors.platforms.base import ReplicaSpec, State
from executors.platforms.on_modal.app import app_name
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.on_modal.image import pinned_requirements
from executors.platforms.on_modal.kinds import HUB_VOLUME, memory_limit_mib
from executors.platforms.places import Place, build_executor
from executors.preflight.quote import PlaceRequest, fitted_places, wanted_places
from executors.preflight.run_url import UsageError
from executors.supervision.supervisor import Supervisor
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.errors import StoreUnclear
from rendezvous.stores.open import open_store
from tests.support.command import asked
from tests.support.fakes import ManualClock
from tests.support.modal_fixtures import (  # noqa: F401
    ROOT,
    WAIT_S,
    bucket,
    executor,
    founded,
    platform,
    run,
    spec,
    started,
    state,
    until,
)
from tests.support.modal_server import TERMINATED, ModalPlatform

NOT_PINNED = "iniconfig"  # installed here with pytest, and nothing that the project needs


def versions(platform: ModalPlatform, run: str) -> int:
    """How often the run's app was deployed."""
    app = platform.server.deployed(app_name(run))
    return app.versions if app else 0


# -------------------------------------------------------------------- deploys


@pytest.mark.slow
def test_a_foreground_run_deploys_once_for_its_publisher_and_its_gpus(platform, run, bucket, tmp_path) -> None:
    """GPUs are launched when the model is there: the functions for both are made before either."""
    found = founded(run, bucket, tmp_path)
    place = Place("modal", gpu=("T4",), secrets=(bucket.secret,))
    write_control(found.store, SystemClock(), places=[place.to_dict()])
    platform.hold(True)
    supervisor = Supervisor(found, build_executor(read_control(found.store).places), SystemClock())
    assert supervisor.tick() is None and supervisor.handle("publish") is None
    assert supervisor.slots.publisher.running and not any(supervisor.handle(f"r0{i}") for i in range(3))
    found.store.put(layout.MODEL_MANIFEST, b"{}")
    publisher = supervisor.slots.publisher.handle
    assert publisher is not None
    call = platform.server.calls[publisher.native]
    platform.server.loop.call_soon_threadsafe(call.end, TERMINATED)  # it waits for a machine, and is not needed
    until(lambda: supervisor.tick() is None and supervisor.handle("r02"), "no GPU was launched")
    assert all(supervisor.handle(f"r0{i}") for i in range(3))
    assert versions(platform, run) == 1, "the publisher's calls met a second deploy"


@pytest.mark.slow
def test_nothing_is_deployed_while_nothing_is_missing(platform, executor, run, tmp_path) -> None:
    (first,) = executor.launch_replicas([spec(run, tmp_path, "waits")])
    started(tmp_path)
    (second,) = platform.executor().launch_replicas([spec(run, tmp_path, "waits", "r01")])
    assert second.native and versions(platform, run) == 1
    assert state(executor, first) is State.RUNNING


@pytest.mark.slow
@pytest.mark.parametrize("change", ["packages", "a secret that was made anew", "an app that was stopped"])
def test_what_has_changed_is_deployed(platform, run, tmp_path, change) -> None:
    modal.Secret.objects.create("mine", {"WORD": "old"}, allow_existing=True)
    platform.executor().launch_replicas([spec(run, tmp_path, "environment", secrets=("mine",))])
    made = ModalExecutor(pip=[NOT_PINNED] if change == "packages" else ())
    if change.startswith("a secret"):
        modal.Secret.objects.delete("mine")
        modal.Secret.objects.create("mine", {"WORD": "new"})
    elif change.startswith("an app"):
        made.shutdown(run)
    (handle,) = made.launch_replicas([spec(run, tmp_path, "environment", "r01", secrets=("mine",))])
    assert versions(platform, run) == (1 if change.startswith("an app") else 2)
    (result,) = made.collect([handle], timeout=WAIT_S)
    assert result.value["WORD"] == ("new" if change.startswith("a secret") else "old")


# -------------------------------------------------------------------- packages of one's own


def version_of(run: str, package: str) -> ReplicaSpec:
    return ReplicaSpec(run, "r00", entrypoint="importlib.metadata:version", kwargs={"distribution_name": package})


@pytest.mark.slow
def test_a_container_has_the_packages_that_pip_names(platform, run) -> None:
    assert NOT_PINNED not in " ".join(pinned_requirements())
    (plain,) = platform.executor().launch_replicas([version_of(run, NOT_PINNED)])
    assert "No package metadata was found" in " ".join(ModalExecutor().collect([plain], timeout=WAIT_S)[0].tail)
    made = ModalExecutor(pip=[NOT_PINNED])
    again = ReplicaSpec.from_dict({**version_of(run, NOT_PINNED).to_dict(), "attempt": 2})
    (result,) = made.collect(made.launch_replicas([again]), timeout=WAIT_S)
    assert result.value and result.state is State.SUCCEEDED
    install = [c for i in platform.server.images.values() for c in i.dockerfile_commands if NOT_PINNED in c]
    assert len(install) == 1 and "torch==" in install[0], "resolved together with ours"


def wish(*more: str) -> PlaceRequest:
    return asked("train", "run.toml", "--run", "s3://b/r", *more).places


def test_pip_is_for_the_places_whose_image_is_built() -> None:
    places = wanted_places(wish("--place", "modal:2", "--place", "local", "--pip", "judge", "--pip", "numpy<3"), [])
    assert [p.options.get("pip") for p in places] == [["judge", "numpy<3"], None]
    for name in ("modal", "hf-jobs", "sky"):
        (place,) = wanted_places(wish("--executor", name, "--pip", "judge"), [])
        assert place.options["pip"] == ["judge"] and wanted_places(wish(), [place.to_dict()]) == (place,)
    with pytest.raises(UsageError, match=r"replicas on local use the Python that is here: `pip install judge`"):
        wanted_places(wish("--executor", "local", "--pip", "judge"), [])


CONFIG = """
name = "test"
[outer]
sync_every = 2
[fleet]
replicas = 2
steps = 2
[inner]
loop = "supervised"
model = "tiny"
data.text = "text.txt"
batch_size = 4
data.context_length = 16
"""


def diloco(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executors.cli.main", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_plan_says_the_limits_the_packages_and_the_price(platform, bucket, tmp_path) -> None:
    (tmp_path / "text.txt").write_text("one plus one is two. " * 300)
    (tmp_path / "run.toml").write_text(CONFIG)
    where = ("--run", platform.url("planned"), "--executor", "modal", "--gpu", "T4", "--secret", bucket.secret)
    done = diloco("plan", str(tmp_path / "run.toml"), *where, "--pip", "judge")
    said = done.stdout + done.stderr
    assert done.returncode == 0 and "T4, at most 4 cores, 8 GiB" in said, said
    assert "and judge" in said and "nothing was started" in said, said
    refused = diloco("plan", str(tmp_path / "run.toml"), *where, "--no-lease", "--max-usd", "2")
    assert refused.returncode == 2 and "--no-lease and a budget contradict each other" in refused.stderr


# -------------------------------------------------------------------- limits by the model's size


def config(tmp_path: Path, **inner: Any) -> RunConfig:
    (tmp_path / "text.txt").write_text("a text that nobody reads")
    raw = {"loop": "supervised", "model": "tiny", "data": {"text": "text.txt"}, **inner}
    return RunConfig.from_dict({"inner": raw, "fleet": {"replicas": 2, "steps": 2}}, tmp_path)


def model_of(folder: Path, parameters: int) -> Path:
    """A folder whose weights have such a header."""
    folder.mkdir()
    tensor = {"dtype": "BF16", "shape": [parameters // 1000, 1000], "data_offsets": [0, 0]}
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": tensor}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def test_the_memory_limit_follows_the_models_size(tmp_path) -> None:
    large = config(tmp_path, model=str(model_of(tmp_path / "m", 7_000_000_000)))
    modal_, local = fitted_places([Place("modal", gpu=("H100",)), Place("local")], large)
    assert modal_.options == {"max_memory_mib": memory_limit_mib(7_000_000_000)} and not local.options
    assert 28e9 * 2 < modal_.options["max_memory_mib"] * 2**20 < 300e9
    dear = build_executor([modal_]).plan([ReplicaSpec("s3://b/r", "r00", gpu=("H100",))]).usd_per_hour
    cheap = build_executor(fitted_places([Place("modal")], config(tmp_path))).plan(
        [ReplicaSpec("s3://b/r", "r00", gpu=("H100",))]
    )
    assert dear is not None and cheap.usd_per_hour is not None and dear > cheap.usd_per_hour
    adapter = config(tmp_path, model=str(tmp_path / "m"), lora={"r": 8})
    (light,) = fitted_places([Place("modal", gpu=("H100",))], adapter)
    assert 28e9 < light.options["max_memory_mib"] * 2**20 < 40e9, "the base is only loaded"
    own = Place("modal", options={"max_memory_mib": 4096})
    assert fitted_places([own], large) == (own,), "whoever names a limit has it"


def test_a_resumed_run_that_moves_to_modal_has_its_models_limit(run, bucket, tmp_path, monkeypatch) -> None:
    found = founded(run, bucket, tmp_path)
    write_control(found.store, SystemClock(), places=[Place("local").to_dict()], stop=True)
    monkeypatch.setattr("executors.cli.starting.verbs._supervise", lambda *_: Answer())
    assert cli.main(["resume", run, "--executor", "modal", "--secret", bucket.secret, "--yes"]) == 0
    (place,) = read_control(found.store).places
    assert place["options"]["max_memory_mib"] == memory_limit_mib(99_200)


# -------------------------------------------------------------------- nothing left to do


def test_a_replica_that_begins_too_late_goes_before_it_claims_or_imports_anything(tmp_path) -> None:
    made = open_run(config(tmp_path), str(tmp_path / "run"), SystemClock())
    clock = ManualClock()
    assert too_late(made, clock) is None
    write_control(made.store, clock, until=clock.wall() + 5)
    assert too_late(made, clock) is None
    clock.sleep(6)
    assert (late := too_late(made, clock)) and late[0] == exitcodes.LEFT and "its lease is over" in late[1]
    write_control(made.store, clock, until=0.0, stop=True)
    assert (late := too_late(made, clock)) and late[0] == exitcodes.LEFT and "`diloco resume` continues it" in late[1]
    made.store.put(layout.commit_key(1), b"{}")
    assert (late := too_late(made, clock)) and late == (
        exitcodes.DONE,
        "all 2 outer steps are committed; nothing to do",
    )
    look = (
        "import sys; from diloco.replica import main; code = main(sys.argv[1:]);"
        "print(code, [m for m in ('torch', 'transformers', 'trl', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", look, made.url, "--slot", "r01"], capture_output=True, text=True)
    assert done.stdout == "0 []\n" and "r01: all 2 outer steps are committed" in done.stderr, done.stderr
    assert not open_store(made.url).list("replicas/") and read_run(made.url).url == made.url


def test_a_lost_answer_at_the_first_look_does_not_end_the_run(monkeypatch, capsys) -> None:
    """It was exit code 75, "it made no progress for too long", after which no replica is started again."""
    answers: list[Any] = [StoreUnclear("no answer"), StoreUnclear("no answer"), "the run"]

    def read(_: str) -> Any:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(replica, "read_run", read)
    clock = ManualClock()
    assert replica.open_patiently("s3://b/r", clock) == "the run" and 1 < clock.now() < 10
    assert capsys.readouterr().err.count("; trying again for 60 s") == 1
    answers += [StoreUnclear("no answer")] * 100
    with pytest.raises(StoreUnclear):
        replica.open_patiently("s3://b/r", clock)
    assert 60 < clock.now() < 80


# -------------------------------------------------------------------- weights from the Hub


class Hub:
    """One file of one model, as the Hub serves it; counts how often it was sent."""

    commit, body = "c" * 40, b"weights" * 1000

    def __init__(self) -> None:
        self.sent, self.stalls, self.half = 0, False, threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (HubHandler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()


class HubHandler(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.send_response(200)
        size = str(len(self.hub.body))
        for name, value in {"X-Repo-Commit": self.hub.commit, "ETag": f'"{"e" * 40}"', "Content-Length": size}.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        self.hub.sent += 1
        half = len(self.hub.body) // 2
        self.wfile.write(self.hub.body[:half])
        if self.hub.stalls:
            self.wfile.flush()
            self.hub.half.set()
            self.rfile.read()  # until the other side is gone
        else:
            self.wfile.write(self.hub.body[half:])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


def download(hub: Hub, run: str, slot: str, **more: Any) -> ReplicaSpec:
    kwargs = {"repo_id": "me/model", "filename": "model.safetensors", "endpoint": hub.url}
    env = {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return ReplicaSpec(run, slot, entrypoint="huggingface_hub:hf_hub_download", kwargs=kwargs, env=env, **more)


@pytest.mark.slow
def test_what_one_container_took_from_the_hub_the_next_one_has(platform, run, hub) -> None:
    made = ModalExecutor(hub_cache="weights")
    for slot in ("r00", "r01", "r02"):
        (result,) = made.collect(made.launch_replicas([download(hub, run, slot)]), timeout=WAIT_S)
        assert result.ok and Path(result.value).read_bytes() == hub.body, result
        until(lambda: list(platform.server.folder.glob("volumes/*/committed/models--me--model/blobs/*")), "not kept")
    assert hub.sent == 1
    (version,) = (version for name, version, _ in platform.server.volumes.values() if name == "weights")
    assert version == 2, "version 1 is for five writers at most"


@pytest.mark.slow
def test_without_a_cache_each_container_takes_it_from_the_hub(platform, run, hub) -> None:
    made = ModalExecutor()
    for slot in ("r00", "r01"):
        env = {"HF_HUB_CACHE": str(platform.server.folder / slot)}  # containers of the tests share a home
        asked = download(hub, run, slot)
        asked = ReplicaSpec.from_dict({**asked.to_dict(), "env": {**asked.env, **env}})
        assert made.collect(made.launch_replicas([asked]), timeout=WAIT_S)[0].ok
    assert hub.sent == 2


@pytest.mark.slow
def test_a_container_that_dies_while_it_downloads_leaves_no_half_file_to_others(platform, run, hub) -> None:
    """Its bytes by then are committed in the background, under a name of their own."""
    made, hub.stalls = ModalExecutor(hub_cache="torn"), True
    (handle,) = made.launch_replicas([download(hub, run, "r00")])
    assert hub.half.wait(WAIT_S)
    platform.kill(handle)
    until(lambda: state(made, handle).ended, "it lives")
    hub.stalls = False
    (result,) = made.collect(made.launch_replicas([download(hub, run, "r01")]), timeout=WAIT_S)
    assert result.ok and Path(result.value).read_bytes() == hub.body and hub.sent == 2
    (folder,) = (platform.server.folder / "volumes").glob("*/committed/models--me--model/blobs/*.incomplete")
    assert folder.stat().st_size <= len(hub.body) // 2, "the torn file is there, and nobody reads it"


@pytest.mark.slow
def test_a_cache_that_somebody_deleted_is_made_again(platform, run, hub) -> None:
    made = ModalExecutor(hub_cache="gone")
    assert made.collect(made.launch_replicas([download(hub, run, "r00")]), timeout=WAIT_S)[0].ok
    modal.Volume.objects.delete("gone")
    other = ModalExecutor(hub_cache="gone")
    assert other.collect(other.launch_replicas([download(hub, run, "r01")]), timeout=WAIT_S)[0].ok
    assert hub.sent == 2 and versions(platform, run) == 2


def test_only_a_model_on_the_hub_has_a_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("diloco.run.sizing.parameters_of", lambda _: 500_000_000)
    (place,) = fitted_places([Place("modal")], config(tmp_path, model="Qwen/Qwen2.5-0.5B"))
    assert place.options == {"hub_cache": HUB_VOLUME, "max_memory_mib": memory_limit_mib(500_000_000)}
    own = Place("modal", options={"hub_cache": ""})
    assert fitted_places([own], config(tmp_path, model="Qwen/Qwen2.5-0.5B"))[0].options["hub_cache"] == ""
    for model in ("tiny", str(model_of(tmp_path / "here", 1000))):
        assert "hub_cache" not in fitted_places([Place("modal")], config(tmp_path, model=model))[0].options
    (line,) = (line for line in build_executor([place]).plan([ReplicaSpec("s3://b/r", "r00")]).lines if "Hub" in line)
    assert "stay in the Volume diloco-hub-cache" in line
