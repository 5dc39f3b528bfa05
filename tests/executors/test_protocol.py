"""Six verbs are an executor; a supervisor asks more, and says what is missing; threads take turns."""

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from executors import FleetExecutor, LocalProcessExecutor, ServerlessExecutor
from executors.platforms.base import ExecutorError, Handle, ReplicaSpec, State, Status
from executors.platforms.executor import Executor
from executors.platforms.places import Place, mixed_executor
from executors.supervision.shutdown import stop_run
from executors.supervision.supervisor import Supervisor
from rendezvous.clock import SystemClock
from rendezvous.stores.memory import MemoryStore

PAGE = Path(__file__).parents[2] / "docs" / "executors.md"
SIX = {"launch_replicas", "poll", "cancel", "collect", "logs", "follow"}


def own_names(kind: type) -> set[str]:
    return {name for name in (*kind.__annotations__, *vars(kind)) if not name.startswith("_")}


def test_the_public_protocol_is_six_verbs_and_no_flag() -> None:
    """Before: sixteen methods and three flags."""
    assert own_names(ServerlessExecutor) == SIX
    assert not own_names(FleetExecutor) & SIX


def six_verbs() -> tuple[Any, str]:
    """The example on the page about executors, after it ran; and its printed lines."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.DOTALL)
    printed = list[str]()
    found: dict[str, Any] = {"print": lambda *words: printed.append(" ".join(map(str, words)))}
    for block in blocks:
        exec(block, found)
    return found["mine"], "\n".join(printed)


def test_the_pages_executor_of_six_verbs_runs_the_short_form_and_is_no_fleets() -> None:
    executor, printed = six_verbs()
    assert printed.splitlines() == ["True [1] exit code 0 (done)"] * 4 + ["['[1]', '[1]']"]
    with pytest.raises(ExecutorError, match=r"CommandExecutor cannot be supervised: it has no close, expect, find, "):
        Supervisor(None, executor, SystemClock())  # type: ignore[arg-type]
    with pytest.raises(ExecutorError, match="it has no close"):
        mixed_executor([Place()], [executor])
    with pytest.raises(ExecutorError, match="it has no close"):
        stop_run(MemoryStore(), SystemClock(), 0.0, print, executor=executor)


def test_an_object_with_the_six_verbs_is_one_and_another_is_not() -> None:
    """The notes' `isinstance(executor, ServerlessExecutor)` raised TypeError."""
    assert isinstance(type("Own", (), dict.fromkeys(SIX))(), ServerlessExecutor) is False, "None is not a method"
    assert isinstance(type("Own", (), dict.fromkeys(SIX, lambda self: None))(), ServerlessExecutor)
    assert not isinstance(type("Five", (), dict.fromkeys(SIX - {"poll"}, lambda self: None))(), ServerlessExecutor)


def test_one_with_a_verb_too_few_is_refused_when_it_is_made() -> None:
    class Mute(ServerlessExecutor):
        pass

    with pytest.raises(TypeError, match="follow"):
        Mute()  # type: ignore[abstract]


class Slow(Executor):
    """While it starts a process, another thread launches the same one."""

    name = "slow"

    def __init__(self) -> None:
        super().__init__()
        self.submitted = 0
        self.others = list[threading.Thread]()
        self.overtaken = list[bool]()

    def plan_line(self, spec: ReplicaSpec) -> str:
        return ""

    def submit(self, specs: Sequence[ReplicaSpec]) -> list[Handle]:
        self.submitted += 1
        if self.submitted == 1:
            for act in (lambda: self.launch_replicas(specs), lambda: self.poll(self.find(specs[0].run))):
                self.others.append(threading.Thread(target=act))
                self.others[-1].start()
                self.others[-1].join(0.2)  # the whole time only where it has to wait
                self.overtaken.append(not self.others[-1].is_alive())
        return [Handle(s.run, s.slot, s.attempt, self.name, native="1") for s in specs]

    def observe(self, handles: Sequence[Handle]) -> list[Status]:
        return [Status(h, State.SUCCEEDED) for h in handles]

    def stop(self, handles: Sequence[Handle], kill: bool) -> None:
        pass

    def discover(self, run: str) -> list[Handle]:
        return []


def test_a_second_thread_waits_and_its_launch_is_the_first_ones() -> None:
    executor = Slow()
    executor.launch_replicas([ReplicaSpec("slow://1", "r00")])
    for thread in executor.others:
        thread.join()
    assert (executor.submitted, executor.overtaken) == (1, [False, False])


def test_threads_share_the_executor_of_this_machine() -> None:
    with LocalProcessExecutor() as executor:

        def work(number: int) -> list[Any]:
            args = {"obj": number}
            handles = executor.launch_replicas(n_replicas=2, entrypoint="json:dumps", entrypoint_args=args)
            return [r.value for r in executor.collect(handles, 60)]

        with ThreadPoolExecutor(4) as threads:
            assert list(threads.map(work, range(4))) == [[str(i)] * 2 for i in range(4)]
