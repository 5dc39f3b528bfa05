"""The outer loop on the real torchft.Manager: a Lighthouse, Gloo, replicas as threads and as processes.

Every inner step of these threads moves each parameter by a fixed amount, so that θ after any sync is known exactly.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from diloco.model.export import state_at
from diloco.outer.loop import OuterLoop
from diloco.outer.make import make_diloco
from diloco.outer.managers.lighthouse import connect_lighthouse, own_address
from diloco.outer.optimizer import nesterov
from diloco.process import exitcodes
from diloco.run.config import ConfigError, RunConfig
from diloco.runlog.reader import read_report
from rendezvous.errors import GaveUp
from tests.support.absent import Without
from tests.support.fleet import Fleet

H = 4


@pytest.fixture
def lighthouse() -> Iterator[str]:
    """A short join time-out would make two of three go on, and the third lose its steps, again and again."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=60000, heartbeat_timeout_ms=1000)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture
def lighthouse_of_two() -> Iterator[str]:
    """No replica begins alone, however late the other one's first heartbeat comes on a busy machine."""
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60000, heartbeat_timeout_ms=30000)
    yield f"127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


class Replica:
    """A thread's model, its torchft Manager, and its loop.   moves: how far one inner step takes every element."""

    def __init__(
        self, lighthouse: str, name: str, moves: float, start: float = 0.0, fragments: int = 1, lr: float | str = 0.7
    ) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            ProcessGroupGloo(timeout=timedelta(seconds=60)), None, None, 2, use_async_quorum=False, init_sync=False,
            timeout=timedelta(seconds=60), quorum_timeout=timedelta(seconds=60), rank=0, world_size=1,
            store_addr="127.0.0.1", store_port=self.store.port, lighthouse_addr=f"http://{lighthouse}",
            replica_id=name, hostname="127.0.0.1",
        )  # fmt: skip
        self.moves = moves
        self.settings: dict[str, Any] = {"sync_every": H, "fragments": fragments, "outer_lr": lr}
        self.model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
        for p in self.model.parameters():
            nn.init.constant_(p, start)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)

    def train(self, until: list[int], before: Callable[["Replica"], None] = lambda replica: None) -> OuterLoop:
        """Inner steps until outer step until[0] is taken.   before: called before each of them."""
        with make_diloco(self.model, self.optimizer, self.manager, **self.settings) as loop:
            while self.manager.current_step() < until[0]:
                before(self)
                for p in self.model.parameters():
                    p.grad = torch.full_like(p, self.moves)
                self.optimizer.step()
        return loop

    def end(self) -> None:
        self.manager.shutdown(wait=False)


def together(*trainings: Callable[[], OuterLoop]) -> list[OuterLoop]:
    with ThreadPoolExecutor(len(trainings)) as pool:
        return [f.result(120) for f in [pool.submit(t) for t in trainings]]


def theta_after(means: list[float], start: float = 0.0) -> torch.Tensor:
    theta, momentum = torch.full((18,), start), torch.zeros(18)
    for mean in means:
        nesterov(theta, momentum, torch.full((18,), mean), lr=0.7, mu=0.5)
    return theta


def held(loop: OuterLoop) -> torch.Tensor:
    return torch.cat(loop.thetas)


def test_two_replicas_take_the_same_outer_steps_as_on_a_bucket(lighthouse_of_two: str) -> None:
    a, b = Replica(lighthouse_of_two, "r00", 1.0), Replica(lighthouse_of_two, "r01", 2.0)
    loops = together(lambda: a.train([3]), lambda: b.train([3]))
    for replica, loop in zip((a, b), loops, strict=True):
        assert torch.equal(held(loop), theta_after([1.5 * H] * 3))
        assert torch.equal(torch.cat([p.detach().reshape(-1) for p in replica.model.parameters()]), held(loop))
        replica.end()
    assert loops[0].state.digest() == loops[1].state.digest()


@pytest.mark.parametrize(("fragments", "lr"), [(1, 0.7), (2, "auto")])
def test_a_late_one_is_healed_before_anything_of_it_counts(lighthouse: str, fragments: int, lr: float | str) -> None:
    """θ, momentum and what "auto" has learned come from a peer; steps from a θ of its own weigh nothing."""
    ready, stop, came = threading.Event(), [1 << 30], list[Replica]()
    a, b = (Replica(lighthouse, f"r0{i}", moves, 0.0, fragments, lr) for i, moves in enumerate((1.0, 2.0)))

    def step(replica: Replica) -> None:
        at = replica.manager.current_step()
        if at == 2:
            ready.set()
        if replica in came and at:
            replica.moves, stop[0] = 1.5, min(stop[0], at + 2 * fragments)

    def join_later() -> OuterLoop:
        assert ready.wait(120)
        came.append(Replica(lighthouse, "r02", 1000.0, 77.0, fragments, lr))  # it beats from here on
        return came[0].train(stop, step)

    loops = together(lambda: a.train(stop, step), lambda: b.train(stop, step), join_later)
    assert stop[0] >= 2 + 2 * fragments and came[0].manager.current_step() == stop[0]
    assert len({loop.state.digest() for loop in loops}) == 1, "θ and momentum"
    if fragments == 1:
        assert torch.equal(held(loops[2]), theta_after([1.5 * H] * stop[0]))
    for replica in (a, b, *came):
        replica.end()


def test_a_failed_sync_costs_no_inner_step(lighthouse: str) -> None:
    """Stock torchft goes back to the last θ; here the next inner step tries again with all of them."""
    a, b = Replica(lighthouse, "r00", 1.0), Replica(lighthouse, "r01", 2.0)

    def failing(manager: Manager) -> None:
        """The second sync's allreduce breaks on both sides."""
        real, calls = manager.allreduce, [0]

        def allreduce(tensor: torch.Tensor, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] == 3:  # two per sync: w·Δ and w
                manager.report_error(RuntimeError("injected"))
            return real(tensor, **options)

        manager.allreduce = allreduce  # type: ignore[method-assign]

    failing(a.manager)
    failing(b.manager)
    steps = {a: 0, b: 0}

    def count(replica: Replica) -> None:
        steps[replica] += 1

    loops = together(lambda: a.train([3], count), lambda: b.train([3], count))
    assert steps == {a: 3 * H + 1, b: 3 * H + 1}
    for loop in loops:
        assert torch.allclose(held(loop), theta_after([1.5 * H, 1.5 * (H + 1), 1.5 * H]), rtol=1e-6)
    assert loops[0].state.digest() == loops[1].state.digest()
    a.end()
    b.end()


def test_settings_that_only_the_bucket_has_are_refused(lighthouse: str) -> None:
    a = Replica(lighthouse, "r00", 1.0)
    with (
        pytest.raises(ConfigError, match=r"outer.codec = 'int8' works only with the bucket; Gloo sends fp32"),
        make_diloco(a.model, a.optimizer, a.manager, sync_every=H, codec="int8"),
    ):
        pass
    a.end()
    with pytest.raises(ConfigError, match="Gloo sends fp32"):
        RunConfig.from_dict({"rendezvous": "lighthouse://h:1", "outer": {"codec": "int8"}})
    for bad in ("lighthouse://h", "http://h:1", "lighthouse://", "lighthouse://u:p@h:1"):
        with pytest.raises(ConfigError, match="is not known"):
            RunConfig.from_dict({"rendezvous": bad})


def test_where_the_lighthouse_is_not_mathematics_but_that_there_is_one_is() -> None:
    here, there = (RunConfig.from_dict({"rendezvous": f"lighthouse://{h}:1"}) for h in ("a", "b"))
    assert here.mathematics() == there.mathematics() != RunConfig().mathematics()
    assert RunConfig.from_dict(here.to_dict()).rendezvous == "lighthouse://a:1"


def test_an_unknown_host_is_said() -> None:
    assert own_address("127.0.0.1", 1) == "127.0.0.1"
    with pytest.raises(GaveUp, match=r"no network route to the lighthouse at nowhere.invalid:1"):
        own_address("nowhere.invalid", 1)


# ---------------------------------------------------------------- processes


def thetas(fleet: Fleet) -> dict[int, set[str]]:
    """Outer step -> the digests of θ and momentum that replicas had after it."""
    found: dict[int, set[str]] = {}
    for e in read_report(fleet.run.store).events:
        if e["event"] == "step":
            found.setdefault(e["step"], set()).add(e["theta"])
    return found


@pytest.mark.slow
def test_processes_lose_one_and_get_it_back(tmp_path: Path, lighthouse: str) -> None:
    """kill -9 of one of three, a successor that is healed by its peers, and the same θ everywhere at the end."""
    fleet = Fleet(
        tmp_path, rendezvous=f"lighthouse://{lighthouse}", outer={"sync_every": 20, "snapshot_every": 4},
        fleet={"steps": 12},
    )  # fmt: skip
    fleet.start_all()
    fleet.wait_for(lambda: fleet.training("r01", 3))
    fleet.sessions["r01"][0].kill()
    fleet.start("r01")
    assert fleet.wait() == {"r00": [0], "r01": [-9, 0], "r02": [0]}, fleet.logs()
    events = read_report(fleet.run.store).events
    assert any(e["event"] == "healed" and (e["slot"], e["generation"]) == ("r01", 2) for e in events), fleet.logs()
    assert sorted(thetas(fleet)) == list(range(12)) and all(len(d) == 1 for d in thetas(fleet).values())
    assert not list((tmp_path / "run" / "steps").glob("*")), "no commits, no deltas"
    at, state = state_at(fleet.run, fleet.model, None)
    assert at == 12 and {state.digest()} == thetas(fleet)[11], "the bucket has the last θ, for export"
    report = read_report(fleet.run.store)
    assert report.done and report.head == 12


@pytest.mark.slow
def test_the_whole_fleet_dies_and_goes_on_from_a_snapshot(tmp_path: Path, lighthouse: str) -> None:
    fleet = Fleet(
        tmp_path, rendezvous=f"lighthouse://{lighthouse}", outer={"sync_every": 20, "snapshot_every": 2},
        fleet={"steps": 8, "replicas": 2},
    )  # fmt: skip
    fleet.start_all()
    fleet.wait_for(lambda: (tmp_path / "run/snapshots/0000000004/manifest.json").exists())
    fleet.kill_all()
    fleet.start_all()
    assert [codes[-1] for codes in fleet.wait().values()] == [0, 0], fleet.logs()
    joined = [e["step"] for e in read_report(fleet.run.store).events if e["event"] == "joined" and e["generation"] == 2]
    assert min(joined) >= 4
    assert len(thetas(fleet)[7]) == 1


@pytest.mark.slow
def test_a_replica_that_is_asked_to_leave_leaves_at_once_and_the_others_go_on(tmp_path: Path, lighthouse: str) -> None:
    fleet = Fleet(tmp_path, rendezvous=f"lighthouse://{lighthouse}", outer={"sync_every": 40}, fleet={"steps": 5})
    fleet.start_all()
    fleet.wait_for(lambda: fleet.training("r01", 1))
    fleet.signal("r01", signal.SIGTERM)
    assert fleet.wait() == {"r00": [0], "r01": [exitcodes.LEFT], "r02": [0]}, fleet.logs()
    assert all(len(d) == 1 for d in thetas(fleet).values())


@pytest.mark.slow
def test_no_lighthouse_is_said_and_resumable(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, rendezvous="lighthouse://127.0.0.1:9")
    fleet.start("r00")
    assert fleet.wait() == {"r00": [exitcodes.GAVE_UP]}, fleet.logs()
    assert "no lighthouse answers at lighthouse://127.0.0.1:9" in fleet.log("r00").read_text()


def test_a_lighthouse_without_torchft_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [one for one in sys.modules if f"{one}.".startswith("torchft.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Without("torchft"), *sys.meta_path])
    session: Any = None
    with pytest.raises(ConfigError, match=r"needs torchft .*Linux on x86-64 and Python up.*use the bucket"):
        connect_lighthouse("lighthouse://127.0.0.1:29510", session)
