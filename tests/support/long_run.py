"""A long run, written by hand in real records: what a bucket holds after STEPS outer steps of a few replicas.

    long_run(steps=1000, replicas=4) ──▶ LongRun.store ──▶ copied(store, s3)        the bucket of a support/s3_server.py

Per outer step: a commit, a mean, one offer, delta and log object per replica; every 20 steps rollouts.  One supervisor;
the second replica was killed once and replaced; three control records; snapshots every 100 steps.

Not promised: blobs of any size: views read none.
"""

import json

from diloco.run.record import RunRecord
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.records.records import Beat, Claim, Listed
from rendezvous.store import Store
from rendezvous.stores.memory import MemoryStore
from tests.diloco.test_report import BYTES, T0, Bucket
from tests.support.s3_server import S3Server

STEP_S = 30.0
NUMBERS = {  # of a GRPO replica's outer step, beside those of Bucket.step_event
    "loss": 0.0123456, "entropy": 1.234567, "kl": 0.001234, "grad_norm": 0.4567891, "completion_length": 211.25,
    "rho": 0.71, "effective_step": 0.9, "cos_pair": 0.31, "mean_norm": 1.25, "outer_lr": 0.7,
}  # fmt: skip


class LongRun(Bucket):
    """step_s apart; r01-1 dies in the middle of the run."""

    def __init__(self, steps: int, replicas: int, step_s: float = STEP_S) -> None:
        self.steps, self.step_s = steps, step_s
        super().__init__(steps=steps + 1, replicas=replicas, store=MemoryStore())
        config = {"name": "long", "outer": {"sync_every": 6}, "inner": {"model": "Qwen/Qwen2.5-0.5B"}}
        self.store.put(layout.RUN, RunRecord(config, {"outer": {}}, {}, "a-run-of-its-own", T0).encode())
        write_control(self.store, self.clock, replicas=replicas, steps=steps + 1, min_replicas=2)
        write_control(self.store, self.clock, max_usd=50.0)
        write_control(self.store, self.clock, until=T0 + 1e6)
        self.slots = [layout.slot_name(i) for i in range(replicas)]
        self.generation = dict.fromkeys(self.slots, 1)
        for slot in self.slots:
            self.launch(slot, 1, 1.0)

    def take(self, slot: str, generation: int, at: float) -> None:
        place = f"modal/{slot}.{generation}"
        self.store.create(layout.claim_key(slot, generation), Claim(slot, generation, "n", T0 + at, place, 77).encode())

    def launch(self, slot: str, attempt: int, at: float) -> None:
        handle = {"run": "r", "slot": slot, "attempt": attempt, "executor": "modal", "native": f"fc-{slot}-{attempt}"}
        about = {"slot": slot, "pid": 0, "attempt": attempt, "executor": "modal", "usd_per_hour": 3.95}
        self.tell("supervisor", 1, at, "launched", **about, launched_at=T0 + at, handle=handle)
        self.take(slot, attempt, at + 20)
        self.tell(slot, attempt, at + 25, "joined", step=0)

    def lose(self, slot: str, at: float) -> None:
        generation = self.generation[slot]
        end = {"state": "LOST", "reason": "preempted by Modal", "exit_code": None, "tail": ["step 7", "SIGTERM"]}
        self.tell("supervisor", 1, at, "lost", slot=slot, attempt=generation, generation=generation, **end)
        self.generation[slot] = generation + 1
        self.launch(slot, generation + 1, at + 1)

    def step(self, t: int) -> None:
        at = self.step_s * (t + 1)
        offers = [self.offer(t, slot, self.generation[slot], 0.1 + 0.0008 * t) for slot in self.slots]
        self.commit(t, at, offers)
        self.store.put(layout.mean_key(t, 0), b"{}")
        self.store.put(layout.mean_blob(t, "n"), b"mean")
        if t % 20 == 0:
            for slot in self.slots:
                self.store.put(layout.rollouts_key(slot, self.generation[slot], t // 20), b"{}\n")
        if t % 100 == 0:
            self.store.put(layout.snapshot_blob(t, "n"), b"theta")

    def offer(self, t: int, slot: str, generation: int, reward: float) -> Listed:
        self.store.put(layout.delta_blob(t, slot, generation, "n"), b"delta")
        return super().offer(t, slot, generation, reward)

    def step_event(self, t: int, at: float, slot: str, generation: int, theta: str | None = None) -> None:
        self.tell(
            slot, generation, at, "step", step=t, h=6, listed=True, samples=192, inner_s=25.0, offer_s=1.5, wait_s=2.5,
            mean_s=0.5, bytes_up=BYTES, bytes_down=2 * BYTES, theta=theta or f"sha256:{t:064x}", **NUMBERS,
        )  # fmt: skip

    def beat(self, steps: int, now: float) -> None:
        for slot in self.slots:
            beat = Beat(slot, self.generation[slot], 9, "train", steps, 3, 4.0, now)
            self.store.put(layout.beat_key(slot), beat.encode())
        self.store.put(layout.beat_key("supervisor"), Beat("supervisor", 1, 9, "watching", 0, 0, 0.0, now).encode())


def long_run(steps: int = 1000, replicas: int = 4, step_s: float = STEP_S) -> LongRun:
    run = LongRun(steps, replicas, step_s)
    for t in range(steps):
        run.step(t)
        if t == steps // 2:
            run.lose("r01", step_s * (t + 1) + 1)
    run.beat(steps, T0 + step_s * steps + 2)
    return run


def copied(store: Store, s3: S3Server, prefix: str = "run") -> str:
    """All objects of `store` in the server's bucket; -> the run's URL."""
    for key in store.list(""):
        copy(store, s3, key, prefix)
    return f"s3://bucket/{prefix}?endpoint={s3.endpoint}"


def copy(store: Store, s3: S3Server, key: str, prefix: str = "run") -> None:
    path = s3.path("bucket", f"{prefix}/{key}")
    path.parent.mkdir(parents=True, exist_ok=True)
    body = store.get(key)
    if body is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(body)


def log_line(body: bytes) -> dict[str, object]:
    return json.loads(body.splitlines()[0])
