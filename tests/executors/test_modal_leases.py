"""No GPU on Modal without a lease, at any moment of twenty kills: the real client, containers, leases of half a minute.

    laptop     `diloco resume`, killed after its n-th request to Modal: deploying, spawning, noting, looking
    detached   the supervisor's container, killed
    replicas   preempted, killed, their host lost
        └─▶ before each launch on a GPU, and ten times a second: control's `until` covers every GPU
        └─▶ at last every supervisor is dead: all GPUs are given back within the lease

The same after each single request, in virtual time, is tests/executors/test_leases.py.
"""

# ruff: noqa: F811

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from diloco.process.session import ORPHAN_GRACE_S
from diloco.runlog.reader import SUPERVISOR
from executors.platforms.on_modal.executor import ModalExecutor
from executors.platforms.places import Place
from executors.supervision.costs import LEASE_S
from executors.supervision.hosted import start_hosted
from rendezvous import layout
from rendezvous.agreement.membership import read_control, write_control
from rendezvous.clock import SystemClock
from rendezvous.store import Store
from tests.support.modal_fixtures import ROOT, bucket, executor, founded, platform, run, until  # noqa: F401
from tests.support.modal_server import ModalPlatform

SHORT_S = 30.0  # the lease that a laptop's supervisor gives here
LEAVES_S = ORPHAN_GRACE_S + 30.0  # from its end until the container is gone, on a machine with other work
LAPTOP = """
import sys
from executors.cli import main as cli
from executors.supervision import costs
costs.LEASE_S = float(sys.argv[2])
sys.exit(cli.main(["resume", sys.argv[1], "--yes"]))
"""


class Witness:
    """Looks at every container with a GPU, and at every launch of one.   longest_s: a lease may be so long."""

    def __init__(self, platform: ModalPlatform, store: Store, longest_s: float) -> None:
        self._platform, self._store, self.longest_s = platform, store, longest_s
        self.faults: list[str] = []
        self.looks = self.launches = 0
        self._since: dict[str, float] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join()

    def before_launch(self, function_id: str) -> None:
        """Check at each launch on a GPU: its launcher may die before the next line."""
        if self._platform.server.functions[function_id].definition.resources.gpu_config.gpu_type:
            self.launches += 1
            self._check(f"the launch {self.launches}", time.time())

    def _look_on(self) -> None:
        while not self._over.wait(0.1):
            for container in self._platform.with_gpus():
                self.looks += 1
                self._check(container.id, self._since.setdefault(container.id, time.time()))

    def _check(self, who: str, since: float) -> None:
        end, now = read_control(self._store).until, time.time()
        if not 0 < end <= now + self.longest_s + 1:
            self.faults.append(f"{who}: the lease ends at {end:.1f}, and it is {now:.1f}")
        elif now > max(end, since) + LEAVES_S:
            self.faults.append(f"{who}: its lease has been over for {now - end:.1f} s")


class Laptop:
    """`diloco resume` in a terminal that is killed after so many requests to Modal, or after so many seconds."""

    def __init__(self, platform: ModalPlatform, witness: Witness, url: str, requests: int, seconds: float) -> None:
        self._left, self._witness = requests, witness
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", LAPTOP, url, str(SHORT_S)]
        platform.server.watch = self._count
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            self.said = self.process.communicate(timeout=seconds)[0].decode()
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.said = self.process.communicate()[0].decode()
        platform.server.watch = lambda name, request, who: self._witnessed(name, request)

    def _count(self, name: str, request: Any, who: str) -> None:
        self._witnessed(name, request)
        if not who:
            self._left -= 1
            if self._left == 0:
                self.process.kill()

    def _witnessed(self, name: str, request: Any) -> None:
        if name == "FunctionMap":
            self._witness.before_launch(request.function_id)


@pytest.fixture
def witness(platform: ModalPlatform, run: str, bucket: Any, tmp_path: Any) -> Iterator[Witness]:
    found = founded(run, bucket, tmp_path, fleet={"replicas": 2, "min_replicas": 1, "steps": 100_000})
    place = Place("modal", gpu=("T4",), secrets=(bucket.secret,))
    write_control(found.store, SystemClock(), places=[place.to_dict()])
    made = Witness(platform, found.store, SHORT_S)
    made.store = found.store  # type: ignore[attr-defined]
    yield made
    made.close()


def disturb(platform: ModalPlatform, executor: ModalExecutor, url: str, n: int) -> None:
    """One of the replicas, if it has a container now."""
    acts = (platform.crash, platform.preempt, platform.kill)
    for handle in executor.find(url):
        if handle.slot == f"r0{n % 2}" and platform.server.calls[handle.native].container is not None:
            acts[n % 3](handle)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_gpu_is_without_a_lease_at_any_moment_of_twenty_kills(platform, executor, run, witness) -> None:
    kills = [Laptop(platform, witness, run, requests, 60) for requests in (3, 8, 14, 20, 27, 35)]
    until(
        lambda: witness.store.get(layout.MODEL_MANIFEST) is not None or _published(platform, run, witness),
        "no model",
        120,
    )
    kills += [Laptop(platform, witness, run, requests, 60) for requests in (4, 9, 13, 17, 21, 25)]
    for n in range(8):
        disturb(platform, executor, run, n)
        kills.append(Laptop(platform, witness, run, 60 + 30 * n, 25))
    assert len(kills) == 20 and all(laptop.process.returncode == -9 for laptop in kills), [k.said for k in kills]
    assert witness.launches >= 2 and witness.looks > 50, "no GPU was there to look at"
    until(lambda: platform.live() == 0, "a GPU is billed though everybody else is dead", SHORT_S + LEAVES_S + 30)
    assert not witness.faults, witness.faults[:5]


def _published(platform: ModalPlatform, run: str, witness: Witness) -> bool:
    """A supervisor is needed for that; it is killed, too, and not counted."""
    Laptop(platform, witness, run, 10_000, 12)
    return witness.store.get(layout.MODEL_MANIFEST) is not None  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_gpu_is_without_a_lease_while_a_detached_supervisor_dies_again_and_again(
    platform, executor, run, witness
) -> None:
    """Its lease is the usual one; a supervisor that takes over from a laptop makes it shorter at once."""
    witness.longest_s = LEASE_S
    platform.server.watch = lambda name, request, who: (
        witness.before_launch(request.function_id) if name == "FunctionMap" else None
    )
    supervisor = start_hosted(executor, run)
    call = platform.server.calls[supervisor.native]
    for n in range(1, 8):
        until(lambda n=n: call.starts >= n and call.container is not None, f"no start {n}", 60)
        time.sleep(0.7 * n)  # a later moment each time: importing, looking, deploying, launching, watching
        platform.crash(supervisor)
        disturb(platform, executor, run, n)
    until(lambda: witness.launches >= 2 and len(platform.with_gpus()) == 2, "no GPU was launched", 240)
    executor.cancel([h for h in executor.find(run) if h.slot == SUPERVISOR], 0.0)
    until(lambda: call.result is not None, "the supervisor lives")
    witness.longest_s = LEASE_S
    Laptop(platform, witness, run, 10_000, 25)
    assert read_control(witness.store).until <= time.time() + SHORT_S
    until(lambda: platform.live() == 0, "a GPU is billed though everybody else is dead", SHORT_S + LEAVES_S + 30)
    assert not witness.faults, witness.faults[:5]
