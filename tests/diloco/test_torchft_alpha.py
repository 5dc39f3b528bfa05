"""α, τ and F against real torchft: its DiLoCo and its Manager, unmodified, on the same data, made at test time.

    reference   torchft.local_sgd.DiLoCo ─ torchft.Manager ─ Lighthouse, Gloo       the model as it is, SGD(nesterov)
    ours        make_diloco ─ StoreManager ─ memory://                              flat fragments, `nesterov`

Two replicas as threads, 240 inner steps of AdamW each, data of their own.  All 240 losses of both are compared.

Not promised: equal bits.  torchft's outer optimizer rounds once where ours rounds twice.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from diloco import OuterConfig, StoreManager, make_diloco
from rendezvous.agreement import rules
from rendezvous.agreement.rules import Timing
from rendezvous.stores.memory import MemoryStore

STEPS, WIDTH, MOMENTUM, LR = 240, 16, 0.9, 0.4
LIMIT = timedelta(seconds=60)


@pytest.fixture
def lighthouse() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=60000, quorum_tick_ms=10)
    yield f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    server.shutdown()


@pytest.fixture(autouse=True)
def equal_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica whose round was slow takes fewer inner steps in the next one; on a busy machine that may be either."""
    monkeypatch.setattr(rules, "next_cap", lambda sync_every, *_, **__: sync_every)


def model_of() -> nn.Sequential:
    """Two halves of the same size: `cut` makes the same two fragments as a user of torchft."""
    torch.manual_seed(5)
    halves = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*halves)


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, seed: int, outer: AbstractContextManager[Any]
) -> list[float]:
    """-> the loss before each inner step.   A teacher network with noise, other inputs for every replica."""
    generator, losses = torch.Generator().manual_seed(seed), list[float]()
    target = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(1)) / WIDTH**0.5
    with outer:
        for _ in range(STEPS):
            x = torch.randn(8, WIDTH, generator=generator)
            loss = (model(x) - torch.tanh(x @ target)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


def both(replica: Callable[[int], list[float]]) -> list[list[float]]:
    with ThreadPoolExecutor(2) as pool:
        return [f.result(120) for f in [pool.submit(replica, i) for i in range(2)]]


def by_torchft(lighthouse: str, config: OuterConfig) -> list[list[float]]:
    making = threading.Lock()

    def replica(i: int) -> list[float]:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            ProcessGroupGloo(timeout=LIMIT), None, None, 2, use_async_quorum=False, init_sync=False, timeout=LIMIT,
            quorum_timeout=LIMIT, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
            lighthouse_addr=lighthouse, replica_id=f"t{i}", hostname="127.0.0.1",
        )  # fmt: skip
        with making:
            model = model_of()
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        outers = [
            torch.optim.SGD(half.parameters(), lr=config.lr, momentum=config.momentum, nesterov=True)  # type: ignore
            for half in model
        ]
        diloco = DiLoCo(
            manager, list(model), inner, outers, sync_every=config.sync_every,  # type: ignore[arg-type]
            fragment_sync_delay=config.fragment_sync_delay, fragment_update_alpha=config.fragment_update_alpha,
        )  # fmt: skip
        losses = trained(model, inner, i, diloco)  # type: ignore[arg-type]
        assert manager.current_step() == STEPS // (config.sync_every // config.fragments)
        manager.shutdown(wait=False)
        return losses

    return both(replica)


def by_us(config: OuterConfig) -> list[list[float]]:
    store, making = MemoryStore(), threading.Lock()

    def replica(i: int) -> list[float]:
        manager = StoreManager(store, f"r{i:02d}", replicas=2, min_replicas=2, timing=Timing(poll=0.01))
        with making:
            model = model_of()
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = trained(model, inner, i, make_diloco(model, inner, manager, config))
        assert manager.current_step() == STEPS // (config.sync_every // config.fragments)
        manager.shutdown()
        return losses

    return both(replica)


@pytest.mark.quick(3)
@pytest.mark.parametrize("alpha", [0.5, 0.0])
@pytest.mark.parametrize("h", [8, 20, 40])
def test_240_losses_are_those_of_torchfts_own_diloco(lighthouse: str, h: int, alpha: float) -> None:
    config = OuterConfig(
        sync_every=h, fragments=2, fragment_sync_delay=2, fragment_update_alpha=alpha, lr=LR, momentum=MOMENTUM,
        weighting="uniform", norm_gate=0,
    )  # fmt: skip
    theirs, ours = torch.tensor(by_torchft(lighthouse, config)), torch.tensor(by_us(config))
    assert theirs[:, -20:].mean() < theirs[:, :20].mean(), "it learns"
    assert (theirs - ours).abs().max() < 1e-5, f"largest difference {(theirs - ours).abs().max():.2g}"
