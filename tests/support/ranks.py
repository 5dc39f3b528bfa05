"""Slots of one or more ranks that train a small model on gradients which a test injects.

    run_fleet(url, {"r00": 2, "r01": 1}, sharded=True, sync_every=4) -> {"r00": [digest of θ and m per outer step], …}

A gradient depends on the slot and the inner step alone, and every product is exact, so each number of ranks, and each
way to hold the parameters, has to give the same bits.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import MockManager, StoreManager
from diloco.outer.ranks.group import Group, join_ranks
from diloco.outer.ranks.lead import lead
from diloco.process.ranks import Followers
from rendezvous.agreement.rules import Timing
from tests.support.fleet import WAIT_S, context

FAST = Timing(beat=0.1, poll=0.01, give_up=100.0)


class Small(nn.Module):
    """Tied, uneven for 2 and for 3 shards, with −0.0 in it, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(13, 5), nn.Linear(5, 7)
        self.frozen = nn.Linear(7, 5).requires_grad_(False)
        self.head = nn.Linear(5, 13, bias=False)
        self.head.weight = self.emb.weight
        generator = torch.Generator().manual_seed(3)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=generator))
            p.data.view(-1)[::3] = -0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(torch.tanh(self.mid(self.emb(x)))))


def inject(model: nn.Module, seed: int) -> None:
    from torch.distributed.tensor import DTensor, distribute_tensor

    generator = torch.Generator().manual_seed(seed)
    for p in (p for p in model.parameters() if p.requires_grad):
        grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        grad.view(-1)[::3] = 0.0
        sharded = isinstance(p, DTensor)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None) if sharded else grad


def train(url: str, slot: str, kind: str, told: str, faults: str, wishes: dict[str, Any], outer: dict[str, Any]) -> int:
    """Be one rank of a slot.   told: file for the digests; rank 0 writes it.

    kind: words of "bfloat16" and "sharded".   faults: "die RANK STEP", "wait STEP PATH", both at an inner step;
    "die RANK CALL N" at the Nth call of Group.CALL; "raise RANK STEP"; "differ", "unled", "unled and met", "apart";
    "absent": rank 1 never joins;   "endless": its loop asks nobody whether the run is done."""
    torch.set_num_threads(1)
    rank = os.environ.get("RANK", "0")
    arm(faults.split(), rank)
    if faults == "differ" and rank == "1":
        outer = {**outer, "sync_every": 2 * outer["sync_every"]}
    if faults in ("unled and met", "absent"):
        join_ranks()
    if faults == "absent" and rank == "1":
        return 0  # as a script that gives the callback to rank 0 alone
    make = partial(StoreManager, url, slot, timing=FAST, **wishes)
    patience = {"absent_s": 0.1} if faults == "absent" else {}
    manager = MockManager(f"unled-{rank}") if faults.startswith("unled") else lead(make, **patience)
    model = Small()
    if "bfloat16" in kind:
        model.to(torch.bfloat16)
    if "sharded" in kind and torch.distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    digests, at = list[str](), 0
    with make_diloco(model, optimizer, manager, **outer) as run:
        while faults == "endless" or not manager.done:
            fail(faults, rank, at)
            inject(model, 1000 * int(slot[1:]) + at + (500 * int(rank) if faults == "apart" else 0))
            optimizer.step()
            at += 1
            if run.committed() > len(digests):
                digests.append(run.state.digest())
    if rank == "0":
        Path(told).write_text(json.dumps(digests))
    return 0


def arm(words: list[str], rank: str) -> None:
    """Let this rank die at a call of its group."""
    if len(words) != 4 or words[:2] != ["die", rank]:
        return
    original, left = getattr(Group, words[2]), [int(words[3])]

    def call(self: Group, *args: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args)

    setattr(Group, words[2], call)


def fail(faults: str, rank: str, step: int) -> None:
    kind, *rest = faults.split() or [""]
    if rest == [rank, str(step)] and kind == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if rest == [rank, str(step)] and kind == "raise":
        raise ValueError("no more")
    if kind == "wait" and rest[0] == str(step):
        until = time.monotonic() + WAIT_S
        while not Path(rest[1]).exists() and time.monotonic() < until:
            time.sleep(0.01)


def be_slot(ranks: int, log: str, act: Callable[[], int]) -> None:
    """The process of a slot: a child of the test.   act: called in each rank."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1), os.dup2(out, 2)
    followers = Followers(ranks, act) if ranks > 1 else None
    code = 1
    try:
        code = act()
    except Exception:
        import traceback

        traceback.print_exc()
        if followers is not None:
            followers.settle()
    finally:
        if followers is not None:
            followers.end()
        sys.stdout.flush()
        os._exit(code)


def start(folder: Path, slot: str, ranks: int, *, kind: str = "", faults: str = "", **outer: Any) -> Any:
    wishes = {name: outer.pop(name) for name in ("replicas", "min_replicas", "steps") if name in outer}
    arguments = (f"file://{folder}/run", slot, kind, str(folder / f"{slot}.json"), faults, wishes, outer)
    return start_ranks(ranks, folder / f"{slot}.log", partial(train, *arguments))


def let_accelerate_shard() -> None:
    """Let accelerate take these CPU ranks for GPUs: it uses FSDP2 on accelerators alone, and replicates here."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    begin = PartialState.__init__

    def begin_with_gpus(self: PartialState, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    PartialState.__init__ = begin_with_gpus


def start_ranks(ranks: int, log: Path, act: Callable[[], int]) -> Any:
    child = context().Process(target=be_slot, args=(ranks, str(log), act))
    child.start()
    return child


def run_fleet(folder: Path, slots: dict[str, int], **settings: Any) -> dict[str, list[str]]:
    """Train to the end.   slots: name -> its ranks."""
    folder.mkdir(exist_ok=True)
    wishes = {"replicas": len(slots), "min_replicas": len(slots), "steps": 3}
    children = {s: start(folder, s, ranks, **{**wishes, **settings}) for s, ranks in slots.items()}
    codes = {s: wait(child) for s, child in children.items()}
    assert set(codes.values()) == {0}, (codes, words(folder))
    return {s: json.loads((folder / f"{s}.json").read_text()) for s in slots}


def wait(child: Any) -> int:
    """The exit code of a slot, once it has ended."""
    child.join(WAIT_S)
    code = child.exitcode
    child.kill()
    return code


def words(folder: Path) -> list[str]:
    return [f"{path.name}\n{path.read_text()[-30_000:]}" for path in sorted(folder.glob("*.log"))]


def children_of(pid: int) -> list[int]:
    """Return the pids of a process's children; those of a replica of several ranks are its ranks 1, 2, …."""
    return [int(p) for path in Path(f"/proc/{pid}/task").glob("*/children") for p in path.read_text().split()]
