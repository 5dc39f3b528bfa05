"""The ranks of one replica: K processes that train one model together.

    rank 0     claims the slot; holds θ, m and Δ; decides
    rank 1 …   train, and follow rank 0's decisions

    training's own group (NCCL, Gloo)    gradients and shards
    this group (Gloo, on the CPU)        agree: rank 0's numbers    spread: its tensors    gather: messages to it

This is not the training's own group: no message waits behind a stuck GPU.  `launched_ranks` counts the processes that
a launcher (torchrun, accelerate, diloco/process/ranks.py) has started.

Not promised: several hosts; a quick end of a rank that waits for a stopped rank: such a rank ends after PATIENCE.
"""

import faulthandler
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count as count_up
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from diloco.process.ranks import MEET, RankLost
from diloco.process.watchdog import where_it_stands, where_it_stood
from diloco.run.config import OuterError

PATIENCE = timedelta(hours=2)  # rank 0 may wait for other replicas, and the ranks wait for rank 0
ABSENT_S = 1800.0  # time for the other ranks to begin their Group; as torch's own limit
SHOW = signal.SIGUSR2  # makes a rank write where it stands
SHOW_S = 0.2  # time for a rank to write that
SAY_S = 30.0  # time until a rank says that it waits for the others
LAUNCHER = ("RANK", "MASTER_ADDR", "MASTER_PORT")  # every launcher sets them beside WORLD_SIZE
_begun = count_up()  # a process's groups; each rank begins them in the same order
_shown: list[Any] = []  # the file of `write_at_request`


class Group:
    """This process among the ranks of its replica.   index: its number.   count: number of ranks.

    absent_s: seconds to wait for the other ranks to begin theirs.
    Raises OuterError if the ranks did not start together, or if one of them does not come."""

    def __init__(self, patience: timedelta = PATIENCE, absent_s: float = ABSENT_S) -> None:
        join_ranks()
        self.index = dist.get_rank()
        self.count = dist.get_world_size()
        await_ranks(_get_default_store(), self.index, self.count, absent_s)
        self._group: Any = dist.new_group(backend="gloo", timeout=patience)

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def agree(self, *words: int) -> tuple[int, ...]:
        """Return rank 0's numbers, on every rank."""
        told = torch.tensor(words, dtype=torch.int64, device="cpu")
        self.spread(told)
        return tuple(told.tolist())

    def spread(self, values: Tensor) -> None:
        """Write rank 0's values over the values of the others, bit for bit.   values: tensors on the CPU."""
        with self._with_peers():
            dist.broadcast(values, 0, group=self._group)

    def tell(self, message: Any) -> Any:
        """Return rank 0's message, any object that pickle can send, on every rank."""
        box = [message]
        with self._with_peers():
            dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    def gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks, in their order; [] on all ranks but 0."""
        found: list[Any] | None = [None] * self.count if self.is_main else None
        with self._with_peers():
            dist.gather_object(message, found, 0, group=self._group)
        return found or []

    @contextmanager
    def _with_peers(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.index} of {self.count} lost another rank of its replica: {str(error).split('. ')[0]}. "
                "The replica ends as a whole; its slot is started again"
            ) from error


def write_at_request() -> None:
    """Let a signal from rank 0 (`show_ranks`) make this rank write its main thread's calls into a file near MEET."""
    with suppress(OSError):  # a full disk: rank 0's place is enough
        _shown.append(_calls_of(f"rank {os.environ['RANK']}").open("w"))
        faulthandler.register(SHOW, _shown[-1], all_threads=False)  # of more than 100, it leaves out the main one


def show_ranks() -> str:
    """Print where the other ranks, which have called `write_at_request`, stand. Return the place of each rank."""
    places = {"rank 0": where_it_stands()}
    for rank in (child for child in multiprocessing.active_children() if child.name.startswith("rank ")):
        calls = ""
        with suppress(OSError):
            os.kill(rank.ident, SHOW)  # type: ignore[arg-type]  # a started process has one
            time.sleep(SHOW_S)
            calls = _calls_of(rank.name).read_text(errors="replace")
        print(f"{rank.name} stands here:\n{calls}", file=sys.stderr, flush=True)
        places[rank.name] = where_it_stood(calls)
    return place_words(places)


def place_words(places: Mapping[str, str]) -> str:
    """Return the ranks' places, rare places first; ranks that wait in a collective come last."""
    together: dict[str, list[str]] = {}
    for rank, place in places.items():
        together.setdefault(place, []).append(rank)
    found = sorted(together.items(), key=lambda one: ("c10d" in one[0], len(one[1])))
    return "; ".join(f"{', '.join(ranks)}: {place}" for place, ranks in found)


def _calls_of(rank: str) -> Path:
    return Path(os.environ[MEET]).with_name(f"{rank}.calls")


def await_ranks(store: Any, index: int, count: int, absent_s: float) -> None:
    """Wait until all ranks have called this. Raise OuterError after `absent_s`.

    A rank that never calls this may be training: then it waits for the other ranks in its first step."""
    number = next(_begun)
    keys = [f"diloco/{number}/{rank}" for rank in range(count)]
    store.set(keys[index], "here")

    def absent(seconds: float) -> str:
        with suppress(RuntimeError):
            store.wait(keys, timedelta(seconds=seconds))
        return ", ".join(str(rank) for rank in range(count) if not store.check([keys[rank]]))

    if away := absent(min(SAY_S, absent_s)):
        print(f"rank {index} of {count} waits for rank {away} to join the run", file=sys.stderr, flush=True)
    if away and (away := absent(absent_s - SAY_S)):
        raise OuterError(
            f"rank {away} of {count} has not joined the run, and rank {index} has waited for {absent_s:.0f} s. Give "
            "DiLoCoCallback to every rank, not to rank 0 alone (in a plain loop, let every rank call `lead`)"
        )


def launched_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes a launcher has started for one model; 1 without a launcher."""
    text = environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise OuterError(f"WORLD_SIZE = {text!r} is not a number of processes. Unset it, or let torchrun set it")
    return int(text)


def join_ranks(environ: Mapping[str, str] = os.environ) -> None:
    """Begin torch.distributed among the launched processes, unless it has begun.   Raises OuterError."""
    if dist.is_initialized():
        return
    count, meet = launched_ranks(environ), environ.get(MEET)
    if missing := [name for name in LAUNCHER if not (meet or environ.get(name))]:
        raise OuterError(
            f"WORLD_SIZE = {count}, but {', '.join(missing)} is not set, so these processes cannot find each other. "
            "Start them with torchrun or accelerate launch, or unset WORLD_SIZE"
        )
    refuse_missing_gpu(int(environ.get("LOCAL_RANK", environ["RANK"])))
    store = None
    if meet:  # a path, and no file:// URL, in which "#" ends the path
        store = dist.FileStore(meet, count)  # pyright: ignore[reportPrivateImportUsage]
        store.set_timeout(PATIENCE)
    backend = "cuda:nccl,cpu:gloo" if torch.cuda.is_available() else "gloo"
    rank = int(environ["RANK"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=PATIENCE)  # rollouts may be slow


def refuse_missing_gpu(rank: int) -> None:
    """Raise OuterError for a rank without a GPU of its own on a machine that has GPUs."""
    if (there := torch.cuda.device_count()) and rank >= there:
        raise OuterError(
            f"rank {rank} has no GPU: this machine shows {there}, and each rank of a replica uses one of its own. "
            f"Use {there} ranks (or CUDA_VISIBLE_DEVICES= for ranks on the CPU)"
        )
