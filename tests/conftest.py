"""For all tests: what was imported to collect them is never searched for garbage, and a GPU is out of sight.

Collecting imports torch, transformers, TRL and Modal: a million objects that live as long as the process.  Python's
collector would walk them again and again; without that, the tests take a tenth to a fifth less time.

What tests expect are a CPU's float32 numbers; a GPU's products are bfloat16 by default.  `make test-gpu` sets
DILOCO_TEST_GPU=1 and runs the tests that are about a GPU.
"""

import copy
import fcntl
import gc
import hashlib
import multiprocessing
import os
import shlex
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

if os.environ.get("DILOCO_TEST_GPU") != "1":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is imported; processes that a test starts have it, too

import pytest

from tests.support.examples import QUICK
from tests.support.warm_python import FLEET, WARM, WarmPython

gc.disable()
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # as in a replica; forks of one process begin with its modules

# huggingface_hub reads the log of a running job until it was silent for ten seconds
WAITS = (
    "test_follow_from_the_tail[hf-jobs]",
    "test_find_sees_all_from_another_process_and_close_stops_nothing[hf-jobs]",
)


OF_TORCHFT = ("bare_manager", "lighthouse", "local_sgd", "outer_empty_rounds", "torchft_alpha", "torchft_shipped")
collect_ignore = [f"diloco/test_{name}.py" for name in OF_TORCHFT if find_spec("torchft") is None]

COLLECTED = pytest.StashKey[Counter[str]]()  # a test file's path -> number of its tests, slow ones too


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow":
        os.environ[QUICK] = "1"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let one process import the heavy modules for all workers, and for their fork servers (tests/support/fleet.py)."""
    if sys.platform != "linux" or config.getoption("cov_source", None):  # coverage begins with a process
        return
    folder = tempfile.TemporaryDirectory(prefix="warm-python-")
    warm = WarmPython(folder.name, [*FLEET, "modal", "textual.app", "moto.server", "s3fs"])
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(warm.close)
    os.environ[WARM] = warm.path
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.quote(warm.path)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Let each worker begin with other files: pytest then rewrites and compiles each file about once, not once each."""
    config, count = session.config, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    places = [Path(arg.partition("::")[0]) for arg in config.args] if count > 1 else []
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))]
    for file in files[int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) :: count]:
        with suppress(Exception, pytest.skip.Exception):  # collection tells it
            import_module(".".join(file.absolute().relative_to(config.rootpath).with_suffix("").parts))


@pytest.hookimpl(tryfirst=True)  # before -m leaves the slow ones out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    config.stash[COLLECTED] = Counter(item.nodeid.partition("::")[0] for item in items)
    quick: Counter[str] = Counter()  # test -> number of its cases that are not slow
    for item in items:
        if item.name in WAITS:
            item.add_marker(pytest.mark.slow)
        if (mark := item.get_closest_marker("quick")) and not item.get_closest_marker("slow"):
            quick[test := item.nodeid.partition("[")[0]] += 1
            if quick[test] > mark.args[0]:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def without_modal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks Modal for the account; where a test has no server for it, that is not its point."""
    from executors.platforms.on_modal import client as on_modal

    asked = on_modal.check_account

    def check_account(*args: Any) -> None:
        if "MODAL_SERVER_URL" in os.environ:
            asked(*args)

    monkeypatch.setattr(on_modal, "check_account", check_account)


@pytest.fixture(autouse=True, scope="session")
def start_models_are_made_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """ToolWorld's start model depends on its settings alone: its supervised steps are taken once for all workers."""
    import torch

    from inner.worlds import toolworld

    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    made: dict[Any, Any] = {}
    make = toolworld.start_model

    def start_model(config: Any) -> Any:
        key = repr((config.toolworld, torch.get_num_threads()))
        if key not in made:
            path = shared / f"start-model-{hashlib.sha256(key.encode()).hexdigest()}"
            with open(f"{path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not path.exists():
                    torch.save(make(config), path)
            made[key] = torch.load(path, weights_only=False)
        model, tokenizer = made[key]
        return copy.deepcopy(model), copy.deepcopy(tokenizer)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(toolworld, "start_model", start_model)
        yield


@pytest.fixture(autouse=True, scope="session")
def packages_are_looked_up_once() -> Iterator[None]:
    """accelerate reads peft's METADATA at each look at a model: an eighth of building a trainer."""
    from accelerate.utils import imports, modeling

    with pytest.MonkeyPatch.context() as patched:
        for module in (imports, modeling):
            patched.setattr(module, "is_peft_available", cache(imports.is_peft_available))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_collection_at_each_training() -> Iterator[None]:
    """Trainer.train calls gc.collect first: 0.2 s among all that tests have imported, a quarter of a small training."""
    from accelerate.utils import memory

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(memory, "clear_device_cache", lambda garbage_collection=False: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def the_wheel_is_packed_once() -> Iterator[None]:
    """An executor packs the code of this tree at its first launch: 0.4 s."""
    from executors.platforms.packages import wheel

    build, made = wheel._build_wheel, dict[Any, bytes]()

    @wraps(build)
    def build_once(project: Any, packages: Any) -> bytes:
        files = [path for package in packages for _, path in wheel._package_files(package)]
        key = repr((project.version, project.read_text("METADATA"), [(p, p.stat().st_mtime_ns) for p in files]))
        if key not in made:
            made[key] = build(project, packages)
        return made[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(wheel, "_build_wheel", build_once)
        yield


@pytest.fixture(autouse=True)
def module_path_stays() -> Iterator[None]:
    """Code of a user puts its modules on the path of this process, where a later test took them for installed ones."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True)
def signal_handlers_stay() -> Iterator[None]:
    """Fail a test that leaves a signal handler, which would hide the signals of later tests of this process."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    left = [number.name for number, handler in before.items() if signal.getsignal(number) is not handler]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert not left, f"the test left its handlers of {', '.join(left)}"


@pytest.fixture(autouse=True)
def process_groups_end() -> Iterator[None]:
    """End torch's default process group, which would make later tests of this process ranks of it."""
    import torch

    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def replicas_end() -> Iterator[None]:
    """Kill the processes that a failed test leaves: the fleet of an endless run would train beside all later tests."""
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(autouse=True, scope="session")
def boxes_are_noted() -> Iterator[list[Any]]:
    from inner.extras.boxes.kept import KeptNamespaces

    begin, begun = KeptNamespaces.__init__, list[Any]()

    def note(self: Any, words: Any) -> None:
        begin(self, words)
        begun.append(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeptNamespaces, "__init__", note)
        yield begun


@pytest.fixture(autouse=True)
def boxes_end(boxes_are_noted: list[Any]) -> Iterator[None]:
    """Kill the processes of the boxes that a test leaves: five shells looked for output beside all later tests."""
    from inner.extras.boxes.kept import _descendants

    yield
    while boxes_are_noted:
        if (process := boxes_are_noted.pop()._process).poll() is None:
            for pid in (*_descendants(process.pid), process.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(autouse=True)
def without_package_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quote asks pip for the packages of rented machines; tests have no network."""
    monkeypatch.setattr("executors.preflight.needs.task_packages.pip_versions", lambda name: None)


@pytest.fixture
def decoded_once() -> Iterator[None]:
    from tests.support.fakes import remembered_records

    with remembered_records():
        yield


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)  # with Python's own numbers it was a sixteenth of what tests take in this process
    gc.enable()
