"""ObjectStoreAllReduce: real processes on a folder, one of them killed and started again."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rendezvous import FileStore, MemoryStore, ObjectStoreAllReduce, layout
from rendezvous.errors import BadDelta, Fenced
from rendezvous.records.records import Commit
from tests.support.fakes import FaultyStore, ManualClock
from tests.support.fleet import context as forkserver


def value(rank: int, step: int, size: int = 1000) -> np.ndarray:
    return np.random.default_rng([rank, step]).standard_normal(size).astype(np.float32)


def reference(step: int, ranks: int) -> np.ndarray:
    total = value(0, step)
    for rank in range(1, ranks):
        total = total + value(rank, step)
    return total / np.float32(ranks)


def work(url: str, rank: int, ranks: int, steps: int, results: Any, die_after: str = "") -> None:
    """All steps from the first that this rank has not offered; dies after writing a key with `die_after` in it."""
    store = FileStore(url)
    if die_after:
        create = store.create

        def create_and_die(key: str, body: bytes) -> None:
            create(key, body)
            if die_after in key:
                os.kill(os.getpid(), signal.SIGKILL)

        store.create = create_and_die  # type: ignore[method-assign]
    group = ObjectStoreAllReduce(url, rank, ranks, timeout_s=60, store=store)
    for step in range(group.step, steps):
        results.put((rank, step, group.allreduce(value(rank, step)).tobytes()))


def start(url: Path, rank: int, ranks: int, steps: int, results: Any, die_after: str = "") -> Any:
    process = forkserver().Process(target=work, args=(str(url), rank, ranks, steps, results, die_after))
    process.start()
    return process


def test_four_processes_get_the_same_mean(tmp_path: Path) -> None:
    results = forkserver().SimpleQueue()
    ranks = [start(tmp_path, rank, 4, 5, results) for rank in range(4)]
    found = {(rank, step): mean for rank, step, mean in (results.get() for _ in range(20))}
    for process in ranks:
        process.join(30)
        assert process.exitcode == 0
    for step in range(5):
        assert {found[rank, step] for rank in range(4)} == {reference(step, 4).tobytes()}


def test_a_rank_is_killed_and_started_again(tmp_path: Path) -> None:
    """It dies right after its offer for step 2: that value counts, and its successor goes on with step 3."""
    results = forkserver().SimpleQueue()
    others = [start(tmp_path, rank, 3, 5, results) for rank in (0, 1)]
    victim = start(tmp_path, 2, 3, 5, results, die_after="steps/0000000002/offer/r02")
    victim.join(30)
    assert victim.exitcode == -signal.SIGKILL
    heir = start(tmp_path, 2, 3, 5, results)
    found = {(rank, step): mean for rank, step, mean in (results.get() for _ in range(14))}
    for process in (*others, heir):
        process.join(30)
        assert process.exitcode == 0
    assert set(found) == {(r, s) for r in (0, 1, 2) for s in range(5)} - {(2, 2)}
    for (_, step), mean in found.items():
        assert mean == reference(step, 3).tobytes()


# ---------------------------------------------------------------------- in one thread


def group(store: Any, rank: int, ranks: int, clock: ManualClock, timeout_s: float = 5.0) -> ObjectStoreAllReduce:
    return ObjectStoreAllReduce("unused", rank, ranks, timeout_s, store=store, clock=clock)


def test_a_timeout_names_the_missing_ranks_and_the_call_can_be_repeated() -> None:
    store, clock = MemoryStore(), ManualClock()
    a, b, c = (group(store, rank, 3, clock) for rank in range(3))
    x = np.float32([1, 2, 3])
    with pytest.raises(TimeoutError, match=r"step 0: no value from rank 1, 2 of 3 within 5 s.*repeat the call"):
        a.allreduce(x)
    assert x.tolist() == [1, 2, 3], "untouched"
    with pytest.raises(TimeoutError, match="no value from rank 2 of 3"):
        b.allreduce(np.float32([4, 5, 6]))
    c.allreduce(np.float32([7, 8, 9]))
    assert a.allreduce(x) is x and x.tolist() == [4, 5, 6]
    assert (a.step, b.step) == (1, 0)
    assert b.allreduce(np.float32([4, 5, 6])).tolist() == [4, 5, 6]


def test_a_restarted_rank_goes_on_where_its_predecessor_stopped() -> None:
    store, clock = MemoryStore(), ManualClock()
    a, b = group(store, 0, 2, clock), group(store, 1, 2, clock)
    with pytest.raises(TimeoutError):
        b.allreduce(np.float32([3]))
    again = group(store, 1, 2, clock)
    with pytest.raises(TimeoutError, match="step 0: no value from rank 0 of 2"):
        again.allreduce(np.float32([100]))
    assert a.allreduce(np.float32([1])).tolist() == [2], "its predecessor's value"
    assert again.step == 1
    with pytest.raises(TimeoutError):
        a.allreduce(np.float32([10]))
    assert again.allreduce(np.float32([100])).tolist() == [55] == a.allreduce(np.float32([10])).tolist()
    with pytest.raises(Fenced, match="r01 now belongs to generation 2"):
        b.allreduce(np.float32([3]))


def test_the_step_of_a_restarted_rank_waits_no_longer_than_a_call() -> None:
    store, clock = MemoryStore(), ManualClock()
    with pytest.raises(TimeoutError):
        group(store, 1, 2, clock).allreduce(np.float32([3]))
    with pytest.raises(TimeoutError, match="step 0: no value from rank 0 of 2"):
        _ = group(store, 1, 2, clock).step


def test_the_kth_call_is_step_k() -> None:
    store, clock = MemoryStore(), ManualClock()
    ranks = [group(store, rank, 2, clock) for rank in range(2)]
    for k in range(4):
        assert [g.step for g in ranks] == [k, k]
        first, second = np.float32([k, 1]), np.float32([k + 2, 3])
        with pytest.raises(TimeoutError):
            ranks[0].allreduce(first)
        ranks[1].allreduce(second)
        ranks[0].allreduce(first)
        assert first.tolist() == second.tolist() == [k + 1, 2]
        commit = Commit.decode(store.get(layout.commit_key(k)) or b"")
        assert [(o.step, o.slot, o.weight) for o in commit.offers] == [(k, "r00", 1.0), (k, "r01", 1.0)]


def test_a_value_that_is_not_finite_is_refused_and_a_better_one_counts() -> None:
    store, clock = MemoryStore(), ManualClock()
    a, b = group(store, 0, 2, clock), group(store, 1, 2, clock)
    with pytest.raises(BadDelta, match="1 of 2 elements"):
        a.allreduce(np.float32([1, np.nan]))
    with pytest.raises(TimeoutError):
        a.allreduce(np.float32([1, 2]))
    assert b.allreduce(np.float32([3, 4])).tolist() == [2, 3]


def test_large_tensors_are_reduced_in_shards_to_the_same_bits() -> None:
    """From 8 MiB on, each of three ranks reduces its part."""
    store, size = MemoryStore(), (9 << 20) // 4
    values = [value(rank, 0, size) for rank in range(3)]
    expected = (values[0] + values[1] + values[2]) / np.float32(3)
    ranks = [ObjectStoreAllReduce("unused", rank, 3, 60, store=store) for rank in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda pair: pair[0].allreduce(pair[1]), zip(ranks, values, strict=True)))
    assert all(v.tobytes() == expected.tobytes() for v in values)
    assert Commit.decode(store.get(layout.commit_key(0)) or b"").mode == "sharded"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_torch_tensors_of_every_float_type(dtype: torch.dtype) -> None:
    store, clock = MemoryStore(), ManualClock()
    a, b = group(store, 0, 2, clock), group(store, 1, 2, clock)
    mine = torch.arange(6, dtype=dtype).reshape(2, 3).t().requires_grad_()
    with pytest.raises(TimeoutError):
        a.allreduce(mine)
    b.allreduce(torch.full((3, 2), 2.0, dtype=dtype))
    assert a.allreduce(mine) is mine and mine.dtype == dtype
    assert torch.equal(mine.detach(), (torch.arange(6, dtype=dtype).reshape(2, 3).t() + 2) / 2)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_numpy_arrays_of_every_float_type_and_shape(dtype: type) -> None:
    clock = ManualClock()
    for x in (np.array(3, dtype), np.ones((2, 3), dtype)[:, ::2], np.zeros(0, dtype)):
        store = MemoryStore()
        a, b = group(store, 0, 2, clock), group(store, 1, 2, clock)
        with pytest.raises(TimeoutError):
            a.allreduce(x)
        b.allreduce(np.full(x.shape, 5, dtype))
        expected = (x + 5) / 2
        assert np.array_equal(a.allreduce(x), expected) and x.dtype == dtype


def test_what_is_no_float_tensor_is_refused() -> None:
    a = group(MemoryStore(), 0, 2, ManualClock())
    for bad in (np.arange(3), torch.arange(3), [1.0, 2.0]):
        with pytest.raises(TypeError, match="floats"):
            a.allreduce(bad)


def test_tensors_of_different_sizes_are_not_averaged() -> None:
    store, clock = MemoryStore(), ManualClock()
    a, b = group(store, 0, 2, clock), group(store, 1, 2, clock)
    with pytest.raises(TimeoutError):
        a.allreduce(np.ones(3))
    with pytest.raises(ValueError, match=r"differ in size: \{'r00': 3, 'r01': 4\}"):
        b.allreduce(np.ones(4))


def test_a_world_of_one_never_touches_the_store() -> None:
    store = FaultyStore(MemoryStore())
    alone, x = group(store, 0, 1, ManualClock()), np.array([1, 2])
    assert alone.allreduce(x) is x and alone.step == 0 and store.calls == []


@pytest.mark.parametrize(("rank", "ranks"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_the_world_is_refused(rank: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} is not one of the {ranks} ranks"):
        ObjectStoreAllReduce("memory://x", rank, ranks)


def test_importing_rendezvous_imports_neither_torch_nor_the_rest() -> None:
    code = (
        "import sys, rendezvous; assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules);"
        "[getattr(rendezvous, name) for name in rendezvous.__all__]; assert 'torch' not in sys.modules;"
        "import numpy; rendezvous.ObjectStoreAllReduce('x', 0, 1).allreduce(numpy.ones(3));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    import rendezvous

    with pytest.raises(AttributeError, match="no attribute 'Quorum'; it has FileStore"):
        _ = rendezvous.Quorum
    assert set(rendezvous.__all__) <= set(dir(rendezvous))
