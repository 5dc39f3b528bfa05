"""A StoreManager without make_diloco, in the hands of plain torchft code: what `report_error` does to a round.

allreduce ─▶ wait ─▶ something breaks ─▶ report_error ─▶ should_commit: False ─▶ next round: that mean again
"""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchft.local_sgd import DiLoCo, LocalSGD

from diloco.outer.managers.manager import MockManager, StoreManager
from rendezvous.agreement.rules import Timing

RANKS, ROUNDS = 3, 5
FAST = Timing(poll=0.005, beat=0.02, dead_after=30.0, give_up=60.0)


def fleet(name: str, live: Callable[[int, StoreManager], Any]) -> list[Any]:
    """The results of `live(rank, manager)` for each of RANKS replicas, each in a thread."""
    found: list[Any] = [None] * RANKS
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        manager = MockManager(name, f"r{rank:02d}", replicas=RANKS, min_replicas=2, timing=FAST)
        try:
            found[rank] = live(rank, manager)
        except BaseException as error:
            errors.append(error)
        finally:
            manager.shutdown()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors, errors
    return found


def gradient(rank: int, step: int) -> torch.Tensor:
    return torch.randn(7, generator=torch.Generator().manual_seed(100 * rank + step))


@pytest.mark.parametrize("when", ["before the average", "after the average"])
def test_a_replica_that_reports_an_error_applies_the_others_mean(when: str, request: Any) -> None:
    def live(rank: int, manager: StoreManager) -> tuple[torch.Tensor, list[int]]:
        x, refused = torch.zeros(7), list[int]()
        while (step := manager.current_step()) < ROUNDS:
            manager.start_quorum()
            tensor, broken = gradient(rank, step), (rank, step) == (1, 2) and not refused
            if broken and when == "before the average":
                tensor.fill_(float("nan"))
                manager.report_error(RuntimeError("a bad gradient"))
            manager.allreduce(tensor).wait()
            if broken and when == "after the average":
                tensor.fill_(1e9)
                manager.report_error(RuntimeError("a broken buffer"))
            assert (manager.errored() is not None) == broken
            if manager.should_commit():
                x += tensor
            else:
                refused.append(step)
            assert manager.errored() is None
        return x, refused

    found = fleet(request.node.name, live)
    assert [refused for _, refused in found] == [[], [2], []]
    assert all(torch.equal(x, found[0][0]) for x, _ in found) and found[0][0].abs().max() < 100


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo"])
def test_torchfts_own_classes_agree_after_an_error(kind: str, request: Any) -> None:
    start = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))  # torch's own seed is every thread's

    def live(rank: int, manager: StoreManager) -> torch.Tensor:
        model = nn.Linear(3, 2, bias=False)
        model.load_state_dict({"weight": start})
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        allreduce, broken = manager.allreduce, [False]

        def breaking(tensor: torch.Tensor, **given: Any) -> Any:
            work = allreduce(tensor, **given)
            if rank == 1 and manager.current_step() == 2 and not broken[0]:
                broken[0] = True
                work.wait()
                tensor.fill_(1e9)
                manager.report_error(RuntimeError("a broken buffer"))
            return work

        manager.allreduce = breaking  # type: ignore[method-assign]
        wrapper = (
            LocalSGD(manager, model, inner, sync_every=2)
            if kind == "LocalSGD"
            else DiLoCo(manager, [model], inner, outer, sync_every=2)
        )  # type: ignore[arg-type]
        step = 0
        with wrapper:
            while manager.current_step() < ROUNDS:
                model.weight.grad = torch.randn(2, 3, generator=torch.Generator().manual_seed(100 * rank + step))
                inner.step()
                step += 1
        assert broken[0] == (rank == 1)
        return model.weight.detach().clone()

    found = fleet(request.node.name, live)
    assert all(torch.allclose(x, found[0]) for x in found) and found[0].abs().max() < 100
