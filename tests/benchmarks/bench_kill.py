"""kill -9 of one of four replicas, and how long the others wait for their next outer step.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.bench_kill [REPEATS=3] [ours|tuned|default]        ours, then tuned

Four real processes with the same inner loop and model. r03 dies, a successor takes its place and dies at the next
point, and so on; each life first takes part in a few outer steps.

    mid-inner    in the middle of its inner steps        mid-upload  its blob is written, its offer is not
    mid-reduce   its offer is listed, it is about to write its part of the mean (torchft: inside its allreduce)

    ours      a folder, sharded reduction
    tuned     stock torchft DiLoCo: join 1 s, heartbeat 1 s, process group 10 s          default   60 s, 5 s, 60 s

wait   from the kill to the next outer step of the slowest survivor, in normal outer steps (the median of the last
       three before the kill)                      lost   rounds that survivors had to throw away, summed over them
Goals for ours: wait ≤ 1.5, nothing lost, every durable offer listed.   `default` takes minutes.
"""

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from diloco.runlog.reader import read_report
from rendezvous.records.records import Offer
from tests.support.fleet import Fleet, context

H, BEFORE = 40, 4  # inner steps per outer step; outer steps of a life before it dies
SURVIVORS = ("r00", "r01", "r02")
OURS = {"mid-inner": "", "mid-upload": "after:put:/delta/", "mid-reduce": "before:put:/mean/"}
PRESETS = {"tuned": (1000, 1000, 10.0), "default": (60000, 5000, 60.0)}  # join ms, heartbeat ms, process group s


@dataclass
class Found:
    waits: list[float] = field(default_factory=list)
    normals: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    def add(self, killed: float, end: float, usual: float) -> None:
        self.waits.append((end - killed) / usual)
        self.normals.append(usual)


@contextmanager
def fleet_in_memory() -> Iterator[Fleet]:
    outer, four = {"sync_every": H, "snapshot_every": 20}, {"replicas": 4, "steps": 10_000}
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(prefix="bench-kill-", dir=where, ignore_cleanup_errors=True) as folder:
        fleet = Fleet(Path(folder), outer=outer, fleet=four)
        try:
            yield fleet
        finally:
            fleet.kill_all()


def after(times: dict[str, list[float]], killed: float) -> float | None:
    """When the slowest survivor had taken its next outer step; None while one has not."""
    nexts = [next((t for t in times[slot] if t > killed), None) for slot in SURVIVORS]
    return None if None in nexts else max(t for t in nexts if t is not None)


def normal(times: dict[str, list[float]], killed: float) -> float:
    last = [t for t in times["r00"] if t < killed][-4:]
    return median(b - a for a, b in pairwise(last))


def killed_at(child: Any) -> float:
    """Waits for its death; -> when that was."""
    while child.is_alive():
        time.sleep(0.001)
    assert child.exitcode == -signal.SIGKILL, f"it ended with {child.exitcode}"
    return time.time()


# ---------------------------------------------------------------------- ours


def taken(fleet: Fleet) -> dict[str, list[float]]:
    """slot -> when it had taken each of its outer steps."""
    found: dict[str, list[float]] = {f"r{i:02d}": [] for i in range(4)}
    for e in sorted(read_report(fleet.run.store).events, key=lambda e: e["at"]):
        if e["event"] == "step":
            found[e["slot"]].append(e["at"])
    return found


def ours(repeats: int) -> dict[str, Found]:
    found = {point: Found() for point in OURS}
    with fleet_in_memory() as fleet:
        for slot in SURVIVORS:
            fleet.start(slot, TEST_SHARDED="1")
        for point in [*OURS] * repeats:
            die = OURS[point] and f"{OURS[point]}@{BEFORE}"
            child, began = fleet.start("r03", die, TEST_SHARDED="1"), len(taken(fleet)["r03"])
            if not die:
                fleet.wait_for(lambda n=began: len(taken(fleet)["r03"]) >= n + BEFORE)
                fleet.wait_for(
                    lambda: (b := fleet.beat("r03")) and b.phase == "train" and H / 4 <= b.inner <= 3 * H / 4
                )
                child.kill()
            killed = killed_at(child)
            end = fleet.wait_for(lambda at=killed: after(taken(fleet), at))
            found[point].add(killed, end, normal(taken(fleet), killed))
        found["mid-inner"].lost.append(unlisted(fleet))
        modes = [c.mode for c in fleet.commits()]
        assert modes.count("sharded") > len(modes) / 2, f"the runs are meant to reduce in shards: {modes}"
    return found


def unlisted(fleet: Fleet) -> int:
    """Durable offers that no commit has counted, but for the newest steps, whose turn may come."""
    commits = fleet.commits()
    counted = {(o.step, o.slot) for c in commits for o in c.offers}
    keys = [k for k in fleet.store.list("steps/") if "/offer/" in k and int(k.split("/")[1]) < len(commits) - 3]
    offers = [Offer.decode(fleet.store.get(k) or b"") for k in keys]
    return len({(o.step, o.slot) for o in offers} - counted)


# ---------------------------------------------------------------------- stock torchft


def torchft_replica(url: str, slot: str, folder: str, lighthouse: str, group_s: float, die: str) -> None:
    """A child: the run's model and inner loop under torchft's DiLoCo, with its time-outs."""
    import torch
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo
    from torchft.local_sgd import DiLoCo

    from diloco.model.fetch import fetch_files, fetch_model
    from diloco.run.record import ModelRecord, read_run
    from inner import Seeds, build_inner
    from rendezvous import layout

    log = os.open(f"{folder}/{slot}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    run, scratch = read_run(url), Path(tempfile.mkdtemp(dir=folder))
    record = ModelRecord.decode(run.store.get(layout.MODEL_MANIFEST) or b"")
    files = fetch_files(run, scratch / "code")
    loop = build_inner(run.config.inner, fetch_model(run.store, record, scratch / "model"), files, Seeds(1, 1, 0), 0)
    store, limit = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), timedelta(seconds=group_s)
    manager = Manager(
        ProcessGroupGloo(timeout=limit), loop.model.load_state_dict, loop.model.state_dict, 2, use_async_quorum=False,
        timeout=limit, quorum_timeout=timedelta(seconds=120), rank=0, world_size=1, store_addr="127.0.0.1",
        store_port=store.port, lighthouse_addr=lighthouse, replica_id=slot, hostname="127.0.0.1", init_sync=False,
    )  # fmt: skip
    outer = torch.optim.SGD(loop.model.parameters(), lr=0.7, momentum=0.5, nesterov=True)
    rounds = watched(manager, Path(folder) / f"{slot}.rounds", die)
    with DiLoCo(manager, [loop.model], loop.optimizer, outer, sync_every=H):
        inner = [0]

        def stop() -> bool:
            inner[0] = (inner[0] + 1) % H
            if die == "mid-inner" and rounds[0] >= BEFORE and inner[0] == H // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return False

        loop.train(stop)


def watched(manager: Any, path: Path, die: str) -> list[int]:
    """Writes a line per round: when, and whether it was committed; dies inside an allreduce.   -> [rounds so far]."""
    decide, reduce, rounds = manager.should_commit, manager.allreduce, [0]

    def should_commit() -> bool:
        yes = decide()
        rounds[0] += 1
        with path.open("a") as f:
            f.write(f"{time.time()} {int(yes)}\n")
        return yes

    def allreduce(tensor: Any, **options: Any) -> Any:
        work = reduce(tensor, **options)
        if die == "mid-reduce" and rounds[0] >= BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        return work

    manager.should_commit, manager.allreduce = should_commit, allreduce
    return rounds


def rounds_of(folder: Path, committed: bool) -> dict[str, list[float]]:
    def lines(slot: str) -> list[list[str]]:
        path = folder / f"{slot}.rounds"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    return {slot: [float(at) for at, yes in lines(slot) if (yes == "1") == committed] for slot in (*SURVIVORS, "r03")}


def torchft(repeats: int, preset: str) -> dict[str, Found]:
    from torchft.coordination import LighthouseServer

    join_ms, heartbeat_ms, group_s = PRESETS[preset]
    server = LighthouseServer("127.0.0.1:0", 2, join_timeout_ms=join_ms, heartbeat_timeout_ms=heartbeat_ms)
    lighthouse = f"http://127.0.0.1:{server.address().rpartition(':')[2]}"
    found = {"mid-inner": Found(), "mid-reduce": Found()}
    with fleet_in_memory() as fleet:

        def start(slot: str, die: str = "") -> Any:
            child = context().Process(
                target=torchft_replica, args=(fleet.url, slot, str(fleet.folder), lighthouse, group_s, die)
            )
            child.start()
            fleet.sessions.setdefault(slot, []).append(child)
            return child

        for slot in SURVIVORS:
            start(slot)
        for point in [*found] * repeats:
            killed = killed_at(start("r03", point))
            end = fleet.wait_for(lambda at=killed: after(rounds_of(fleet.folder, True), at), timeout=200)
            found[point].add(killed, end, normal(rounds_of(fleet.folder, True), killed))
            failed = rounds_of(fleet.folder, False)
            found[point].lost.append(sum(killed < t <= end for slot in SURVIVORS for t in failed[slot]))
    server.shutdown()
    return found


def table(title: str, found: dict[str, Found]) -> None:
    for point, f in found.items():
        waits = " ".join(f"{w:.1f}" for w in f.waits)
        lost = "" if title == "ours" else f"   rounds lost {' '.join(map(str, f.lost))}"
        print(
            f"  {title:8s} {point:11s} wait {median(f.waits):5.2f} normal outer steps of {median(f.normals):.2f} s   "
            f"({waits}){lost}",
            flush=True,
        )
    if title == "ours":
        print(f"  ours     durable offers that were never counted: {sum(found['mid-inner'].lost)}", flush=True)


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    for which in sys.argv[2:] or ["ours", "tuned"]:
        table(which, ours(repeats) if which == "ours" else torchft(repeats, which))


if __name__ == "__main__":
    main()
