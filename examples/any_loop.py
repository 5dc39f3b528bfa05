"""Any PyTorch loop, made elastic: two processes that meet in a folder every 10 steps.

python examples/any_loop.py              kill -9 one process and start the same command again: it continues
"""

import multiprocessing
import sys

import torch
from torch import nn

from diloco import StoreManager, make_diloco

H = 10  # inner steps between two syncs


def batch(slot: str, step: int) -> torch.Tensor:
    """Return a replica's data for inner step `step`: a function of the run's position, so none are seen twice."""
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(step * 1000 + int(slot[1:])))


def train(url: str, slot: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    manager = StoreManager(url, slot, replicas=2, steps=20)
    loss = torch.zeros(())
    with make_diloco(model, optimizer, manager, sync_every=H) as loop:
        step = loop.committed() * H  # 0, or where the run is: with F fragments, committed() · H / F
        while not manager.done:
            x, step = batch(slot, step), step + 1
            loss = (model(x) - x.sin().sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            loop.log(loss=loss, samples=len(x))  # for `diloco status` and the report
            optimizer.step()
        print(f"{slot}: {manager.current_step()} outer steps, loss {loss.item():.3f}, θ {loop.state.digest()[:12]}")


if __name__ == "__main__":
    url = sys.argv[1] if len(sys.argv) > 1 else "runs/any-loop"
    print("the run is", url)
    fleet = [multiprocessing.get_context("spawn").Process(target=train, args=(url, slot)) for slot in ("r00", "r01")]
    for replica in fleet:
        replica.start()
    for replica in fleet:
        replica.join()
