"""Runs with everything that a page shows: kills, late and lost work, evaluations, rollouts, prices, a parent.

    busy_run(steps=12, replicas=3) ──▶ LongRun.store

Not promised: a run that could have happened.
"""

import json
import math
import random

from diloco.run.record import Parent, RunRecord
from rendezvous import layout
from rendezvous.records.records import Listed
from tests.diloco.test_report import BYTES, T0
from tests.support.long_run import NUMBERS, LongRun

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"


class BusyRun(LongRun):
    """A replica is killed now and then; some work is late, some is lost; two steps in hundred are gated."""

    def __init__(self, steps: int, replicas: int, *, step_s: float = 43.2, seed: int = 0) -> None:
        super().__init__(steps, replicas)
        self.dice, self.step_s, self.late = random.Random(seed), step_s, list[Listed]()
        config = {
            "name": f"gsm8k-{replicas}x{steps}",
            "outer": {"sync_every": 20, "max_carry": 2, "lr": 0.7, "momentum": 0.9},
            "inner": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct", "lr": 1e-5, "data": {"prompts": "train.jsonl"}},
            "eval": {"every": max(1, steps // 10), "prompts": "test.jsonl"},
            "fleet": {"replicas": replicas, "steps": steps, "log_rollouts": 4},
        }
        parent = Parent("s3://bucket/first", "abc", 40, "sha256:00", 40, 800)
        self.store.put(layout.RUN, RunRecord(config, {"outer": {}}, {}, "a-busy-run", T0, parent=parent).encode())

    def reward(self, t: int, i: int) -> float:
        level = 0.12 + 0.62 * (1 - math.exp(-3 * t / max(1, self.steps)))
        return min(0.98, max(0.02, level + 0.03 * math.sin(i) + self.dice.gauss(0, 0.035)))

    def step(self, t: int) -> None:
        at = self.step_s * (t + 1)
        offers = self.late
        self.late = []
        for i, slot in enumerate(self.slots):
            chance = self.dice.random()
            if t > 1 and i > 0 and chance < 0.35 / len(self.slots):
                self.lose(slot, at - 0.3 * self.step_s)
                continue
            offer = self.offer(t, slot, self.generation[slot], self.reward(t, i))
            if t > 1 and i > 0 and chance > 0.97:
                self.late.append(offer)
            elif t > 1 and i > 0 and chance > 0.955:
                continue
            else:
                offers.append(offer)
        self.commit(t, at, offers[::-1])
        if t % 5 == 0:
            self.write_rollouts(t)

    def step_event(self, t: int, at: float, slot: str, generation: int, theta: str | None = None) -> None:
        wobble = self.dice.gauss(0, 0.05)
        numbers = {
            **NUMBERS, "loss": 0.9 * math.exp(-2 * t / self.steps) + wobble, "kl": 0.002 * t**0.5 + abs(wobble) / 40,
            "entropy": 1.9 - 0.8 * t / self.steps + wobble,
            "completion_length": 120 + 90 * t / self.steps + 60 * wobble,
            "rho": 0.7 + wobble, "effective_step": 0.95 + wobble, "cos_pair": 0.35 + wobble, "mean_norm": 1.3 + wobble,
        }  # fmt: skip
        self.tell(
            slot, generation, at, "step", step=t, h=20, listed=True, samples=192, inner_s=0.75 * self.step_s,
            offer_s=1.5, wait_s=3 + 20 * abs(wobble), mean_s=0.9, bytes_up=BYTES, bytes_down=2 * BYTES,
            theta=theta or f"sha256:{t:064x}", **numbers,
        )  # fmt: skip

    def write_rollouts(self, t: int) -> None:
        for slot in self.slots[:2]:
            rows = [json.dumps({"step": t})]
            rows += [json.dumps(rollout(t, k)) for k in range(3)]
            self.rollouts = getattr(self, "rollouts", {})
            n = self.rollouts.get((slot, self.generation[slot]), 0)
            self.rollouts[slot, self.generation[slot]] = n + 1
            self.store.put(layout.rollouts_key(slot, self.generation[slot], n), ("\n".join(rows) + "\n").encode())

    def evaluate(self, t: int) -> None:
        mean = 0.1 + 0.55 * (1 - math.exp(-3 * t / self.steps))
        sums = {"reward": [200, 200 * mean, 200 * mean * mean + 200 * 0.2]}
        about = {"step": t, "share": 0, "shares": 1, "prompts": 200, "total": 200}
        self.tell("r00", 1, self.step_s * t + 1, "evaluated", **about, greedy=sums)


def rollout(t: int, k: int) -> dict[str, object]:
    text = "He has 3 apples and buys 4, so 3 + 4 = 7. #### 7" if k else f"I do not know. {EVIL}"
    return {
        "messages": [
            {"role": "user", "content": "Tom has 3 apples and buys 4 more. How many has he?"},
            {"role": "assistant", "content": text},
        ],
        "first": 1, "reward": 1.0 if k else 0.0, "environment": None, "unsure": {},
    }  # fmt: skip


def busy_run(steps: int = 12, replicas: int = 3) -> BusyRun:
    run = BusyRun(steps, replicas)
    run.steps = steps
    run.tell("supervisor", 1, 0.5, "started", text="supervisor started on laptop")
    run.evaluate(0)
    for t in range(steps):
        run.step(t)
        if (t + 1) % max(1, steps // 10) == 0:
            run.evaluate(t + 1)
    run.tell("r00", 1, run.step_s * steps * 0.6, "nothing_learned", step=3, cause=f"all rewards are equal {EVIL}")
    run.beat(steps, T0 + run.step_s * steps + 2)
    return run
