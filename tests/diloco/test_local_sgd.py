"""torchft's LocalSGD, unmodified, on a bucket in the strict profile: parameters are averaged exactly and uniformly.

    every rank   ── H steps of its own ──▶ p_i ── mean over all ranks, at every step ──▶ p

`min_replicas = replicas` is the strict profile: no step is decided with fewer, nothing is late, all weigh the same.
"""

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torchft.local_sgd import LocalSGD

from diloco.outer.managers.manager import StoreManager
from rendezvous.agreement.rules import Timing
from rendezvous.layout import slot_name
from rendezvous.records.records import Commit
from rendezvous.stores.files import FileStore
from tests.support.fleet import context as forkserver

H, RANKS, ROUNDS = 3, 3, 4
Found = dict[tuple[int, int], list[np.ndarray]]  # (rank, round) -> parameters after it


def start_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


def gradient(rank: int, step: int, index: int, shape: Any) -> np.ndarray:
    return np.random.default_rng([rank, step, index]).standard_normal(shape).astype(np.float32)


def inner_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    for i, p in enumerate(model.parameters()):
        p.grad = torch.from_numpy(gradient(rank, step, i, tuple(p.shape)))
    optimizer.step()


def reference(rounds: int) -> list[list[np.ndarray]]:
    """The parameters after each round, by plain arithmetic: (p₀ + p₁ + …) / n in fp32, in rank order."""
    models = [start_model() for _ in range(RANKS)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    seen = []
    for round_ in range(rounds):
        for rank in range(RANKS):
            for k in range(H):
                inner_step(models[rank], optimizers[rank], rank, round_ * H + k)
        together = list(zip(*(m.parameters() for m in models), strict=True))
        arrays = [[p.detach().numpy() for p in ps] for ps in together]
        means = [(a + b + c) / np.float32(RANKS) for a, b, c in arrays]
        for m in models:
            for p, mean in zip(m.parameters(), means, strict=True):
                p.data.copy_(torch.from_numpy(mean))
        seen.append(means)
    return seen


def work(url: str, rank: int, results: Any, die_after: str = "") -> None:
    """All rounds, with H inner steps each; dies after it created a key with `die_after` in it."""
    torch.set_num_threads(1)
    store, model = FileStore(url), start_model()
    if die_after:
        dies(store, die_after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = StoreManager(
        store, slot_name(rank), replicas=RANKS, min_replicas=RANKS, timing=Timing(give_up=60.0),
        load_state_dict=model.load_state_dict, state_dict=model.state_dict,
    )  # fmt: skip
    manager.disallow_state_dict_read()  # what torchft's first hook does: heal, before the data position is known
    with LocalSGD(manager, model, optimizer, sync_every=H):  # type: ignore[arg-type]
        while manager.current_step() < ROUNDS:
            at = manager.current_step()
            for k in range(H):
                inner_step(model, optimizer, rank, at * H + k)
            results.put((rank, at, [p.detach().numpy().copy() for p in model.parameters()]))
    manager.shutdown()


def dies(store: FileStore, after: str) -> None:
    create = store.create

    def create_and_die(key: str, body: Any) -> None:
        create(key, body)
        if after in key:
            os.kill(os.getpid(), signal.SIGKILL)

    store.create = create_and_die  # type: ignore[method-assign]


def run(folder: Path, die_after: str = "") -> Found:
    """die_after: where rank 1 dies; its successor starts at once."""
    fork = forkserver()
    results = fork.SimpleQueue()
    fleet = [
        fork.Process(target=work, args=(str(folder), rank, results, die_after if rank == 1 else ""))
        for rank in range(RANKS)
    ]
    for p in fleet:
        p.start()
    if die_after:
        fleet[1].join(60)
        assert fleet[1].exitcode == -signal.SIGKILL
        fleet[1] = fork.Process(target=work, args=(str(folder), 1, results))
        fleet[1].start()
    found: Found = {}
    while len(found) < RANKS * ROUNDS - bool(die_after):
        rank, at, parameters = results.get()
        found[rank, at] = parameters
    for p in fleet:
        p.join(30)
        assert p.exitcode == 0
    return found


def check(found: Found, expected: list[list[np.ndarray]], folder: Path) -> None:
    for (_, at), parameters in found.items():
        for mine, want in zip(parameters, expected[at], strict=True):
            assert mine.tobytes() == want.tobytes()
    for t in range(ROUNDS):
        commit = Commit.decode(FileStore(folder).get(f"steps/{t:010d}/commit.json") or b"")
        assert [(o.step, o.slot, o.weight) for o in commit.offers] == [(t, slot_name(r), 1.0) for r in range(RANKS)]


def test_parameters_are_averaged_exactly_and_uniformly(tmp_path: Path) -> None:
    expected = reference(ROUNDS)  # before the fork: torch imports a lot at its first optimizer step
    check(run(tmp_path), expected, tmp_path)


def test_a_rank_that_dies_after_its_offer_counts_and_its_successor_goes_on(tmp_path: Path) -> None:
    expected = reference(ROUNDS)
    found = run(tmp_path, die_after="steps/0000000001/offer/r01")
    assert (1, ROUNDS - 1) in found
    check(found, expected, tmp_path)
