"""Platforms for the contract test: what an executor talks to, and how to hurt it.

    with LocalPlatform(folder) as platform:
        executor = platform.executor()      a new one each time, with no state of the last
        platform.kill(handle) …

The ones that need a server are tests/support/modal_server.py and tests/support/hf_server.py.
"""

import os
import signal
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self

from diloco.process import processes
from diloco.process.own_files import read_json
from examples.toy_platform.toy import ToyExecutor
from executors.platforms.base import FleetExecutor, Handle, ReplicaSpec
from executors.platforms.on_host.executor import LocalProcessExecutor
from executors.platforms.on_slurm.executor import SlurmExecutor
from executors.platforms.on_slurm.job import CARD, kill_tree
from rendezvous.records.schema import from_json


class Platform(Protocol):
    """name: the executor's.   environ: what another process needs to reach the same platform.

    recipe: Python lines that make `executor` there.
    """

    name: str
    environ: dict[str, str]
    recipe: str

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def executor(self) -> FleetExecutor:
        """A new one, with no local state of the last."""
        ...

    def url(self, name: str) -> str:
        """A run that it accepts."""
        ...

    def spoil(self, spec: ReplicaSpec) -> ReplicaSpec:
        """The same spec, but one that cannot start."""
        ...

    def kill(self, handle: Handle) -> None:
        """SIGKILL to its processes: a lost host, and the same input does not start again."""
        ...

    def preempt(self, handle: Handle) -> bool:
        """SIGINT or SIGTERM, grace, SIGKILL, the same input again.  False: no such thing there."""
        ...

    def hold(self, on: bool) -> bool:
        """New launches stay PENDING until released.  False: it has no such state."""
        ...

    def lose_reply(self) -> bool:
        """The next launch request is done, and its answer lost.  False: no such thing there."""
        ...

    def drop_logs(self) -> bool:
        """Cut the log stream once, after some lines.  False: no such thing there."""
        ...

    def live(self) -> int:
        """Processes of replicas that still run there."""
        ...


class OwnMachine(ABC):
    """The common part of platforms without a server."""

    environ: dict[str, str]

    def __init__(self, folder: Path) -> None:
        self.folder, self.environ = folder, {}
        self._executors: list[FleetExecutor] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for executor in self._executors:
            executor.close()

    @abstractmethod
    def executor(self) -> FleetExecutor: ...

    def url(self, name: str) -> str:
        return f"file://{self.folder / name}"

    def spoil(self, spec: ReplicaSpec) -> ReplicaSpec:
        (self.folder / "file").write_text("a file where a folder should be")
        return replace(spec, run=f"file://{self.folder}/file/run")

    def preempt(self, handle: Handle) -> bool:
        return False

    def hold(self, on: bool) -> bool:
        return False

    def lose_reply(self) -> bool:
        return False

    def drop_logs(self) -> bool:
        return False

    def live(self) -> int:
        found = [h for run in self.folder.iterdir() if run.is_dir() for h in self.executor().find(f"file://{run}")]
        return sum(processes.is_alive(h.pid, h.started) for h in found)


class LocalPlatform(OwnMachine):
    name = "local"
    recipe = "from executors import LocalProcessExecutor\nexecutor = LocalProcessExecutor(method='spawn')"

    def executor(self) -> LocalProcessExecutor:
        made = LocalProcessExecutor(["tests.support.entrypoints"])
        self._executors.append(made)
        return made

    def kill(self, handle: Handle) -> None:
        with suppress(ProcessLookupError):
            os.killpg(handle.pid, signal.SIGKILL)


class SlurmPlatform(OwnMachine):
    """submitit's local mode."""

    name = "slurm"

    @property
    def recipe(self) -> str:
        jobs = str(self.folder / "jobs")
        return (
            "from pathlib import Path\nfrom executors.platforms.on_slurm.executor import SlurmExecutor\n"
            f"executor = SlurmExecutor(cluster='local', folder=Path({jobs!r}))"
        )

    def executor(self) -> SlurmExecutor:
        return SlurmExecutor(cluster="local", folder=self.folder / "jobs")

    def spoil(self, spec: ReplicaSpec) -> ReplicaSpec:
        return replace(spec, secrets=("NO_SUCH_SECRET",))

    def kill(self, handle: Handle) -> None:
        kill_tree(handle.pid, handle.started)

    def live(self) -> int:
        cards = [from_json(Handle, read_json(file)) for file in self.folder.glob(f"jobs/*/*/{CARD}")]
        return sum(processes.is_alive(h.pid, h.started) for h in cards)


class ToyPlatform(OwnMachine):
    """examples/toy_platform: what a new platform needs at the least."""

    name = "toy"

    @property
    def recipe(self) -> str:
        folder = str(self.folder / "toys")
        return f"from examples.toy_platform.toy import ToyExecutor\nexecutor = ToyExecutor(folder={folder!r})"

    def executor(self) -> ToyExecutor:
        return ToyExecutor(folder=self.folder / "toys")

    def spoil(self, spec: ReplicaSpec) -> ReplicaSpec:
        return replace(spec, secrets=("NO_SUCH_SECRET",))

    def kill(self, handle: Handle) -> None:
        with suppress(ProcessLookupError):
            os.killpg(handle.pid, signal.SIGKILL)
