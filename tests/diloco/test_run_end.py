"""A loop with more batches than the run has steps: the block ends at θ of the last outer step.

    for batch in endless: …        no commit beyond `steps`, and no inner step that nobody shares stays in the model

The simulator (tests/sim) has no such loops: its replicas end as those of `diloco train` do.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch
from torch import nn

from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import StoreManager
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Timing
from rendezvous.clock import SystemClock
from rendezvous.stores.memory import MemoryStore

STEPS, H, ENOUGH = 3, 4, 200
QUICK = Timing(poll=0.002, beat=0.02)


def endless(most: int = ENOUGH) -> Iterator[int]:
    """More batches than any run of these tests needs."""
    yield from range(most)
    raise AssertionError(f"the block went on for {most} inner steps")


def trained(
    store: MemoryStore, slot: str = "r00", batches: Iterable[int] | None = None, ends: int = STEPS, **more: Any
) -> tuple[int, list[torch.Tensor]]:
    """The loop of docs/scripts.md. Return its inner steps, and the weights that it ends with.   ends: its last step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    settings = {"sync_every": H, **{k: more.pop(k) for k in list(more) if k.startswith("fragment")}}
    manager, taken = StoreManager(store, slot, steps=STEPS, timing=QUICK, **more), 0
    with make_diloco(model, optimizer, manager, **settings) as run:
        for number in batches or endless():
            optimizer.zero_grad()
            model(torch.full((1, 4), 1.0 + number % 5 + int(slot[1:]))).square().sum().backward()
            taken += 1
            optimizer.step()
    assert manager.done and not manager.left and run.committed() == ends
    theta = dict(run.theta())
    assert all(torch.equal(p, theta[name]) for name, p in model.named_parameters()), "it ends at θ"
    return taken, [value.clone() for value in theta.values()]


def commits(store: MemoryStore) -> int:
    return next(t for t in count() if store.get(layout.commit_key(t)) is None)


@pytest.mark.parametrize("more", [{}, {"fragments": 2}, {"fragments": 2, "fragment_sync_delay": 1}], ids=str)
def test_an_endless_loop_ends_with_the_run(more: dict[str, Any]) -> None:
    store = MemoryStore()
    taken, _ = trained(store, replicas=1, **more)
    assert commits(store) == STEPS and taken <= STEPS * H + 1, "the step that learned of the end is taken back"


def test_of_two_replicas_neither_waits_for_the_other_at_the_end() -> None:
    store = MemoryStore()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(trained, store, slot, replicas=2, min_replicas=2) for slot in ("r00", "r01")]
        (_, first), (_, second) = (one.result(120) for one in both)
    assert commits(store) == STEPS and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_process_that_joins_a_finished_run_holds_its_theta() -> None:
    store = MemoryStore()
    _, first = trained(store, replicas=1)
    taken, late = trained(store, "r01")
    assert taken == 1 and commits(store) == STEPS
    assert all(torch.equal(a, b) for a, b in zip(first, late, strict=True))


def test_a_run_that_is_shortened_in_the_middle_of_a_round_ends_at_its_theta() -> None:
    store = MemoryStore()

    def batches() -> Iterator[int]:
        for number in endless():
            if number == H + 2:  # after the first outer step; the replica hears of it at the next sync at the latest
                write_control(store, SystemClock(), steps=1)
            yield number

    taken, _ = trained(store, batches=batches(), ends=1, replicas=1)
    assert commits(store) == 1 and taken <= 2 * H
