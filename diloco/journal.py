"""What one life of a replica writes down for people: one small object of JSON lines per outer step.

    log/{slot}-{generation}/000000.jsonl, 000001.jsonl, …        {"at": …, "event": "step", "step": 3, "reward": 0.4, …}
    log/{slot}-{generation}/000000.rollouts.jsonl, …             a few rollouts of one outer step (inner/watched.py)

A `kill -9` loses what was said since the last outer step, nothing else.  Writing never fails a replica.
"""

import json
import sys
import threading
from collections.abc import Iterator
from typing import Any

from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.errors import StoreError
from rendezvous.store import Store

LOUD = {
    "nothing_learned", "store_trouble", "forged", "bad_offer", "poisoned", "bad_blob", "bad_snapshot", "base_differs",
    "replay_differs", "warning",
}  # fmt: skip


class Journal:
    """Collects events; `flush` makes them an object.  Loud ones also go to stderr, at once."""

    def __init__(self, store: Store, clock: Clock, slot: str, generation: int) -> None:
        self._store, self._clock, self._slot, self._generation = store, clock, slot, generation
        self._lines: list[str] = []
        self._written = 0
        self._watched: list[dict[str, Any]] = []
        self._samples = 0
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def tell(self, event: str, **fields: Any) -> None:
        line = json.dumps({"at": round(self._clock.wall(), 3), "event": event, **_rounded(fields)})
        if event in LOUD:
            print(f"{self._slot}-{self._generation} {line}", file=sys.stderr, flush=True)
        with self._lock:
            self._lines.append(line)

    def watch(self, step: int, sample: dict[str, Any]) -> None:
        """What the inner loop's `sample` gave, to be written with the next flush."""
        if sample:
            with self._lock:
                self._watched.append({"step": step, **sample})

    def flush(self) -> None:
        with self._writing:  # one at a time, and nobody who tells something waits for it
            self._flush_samples()
            with self._lock:
                lines, self._lines = self._lines, []
            if not lines:
                return
            try:
                body = "\n".join(lines).encode() + b"\n"
                self._store.put(layout.log(self._slot, self._generation, self._written), body)
                self._written += 1
            except StoreError as error:
                print(f"{self._slot}: log not written: {error}; trying again", file=sys.stderr, flush=True)
                with self._lock:
                    self._lines = lines + self._lines

    def _flush_samples(self) -> None:
        with self._lock:
            watched, self._watched = self._watched, []
        for sample in watched:
            try:
                head = {k: v for k, v in sample.items() if k != "rollouts"}
                body = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in [head, *sample["rollouts"]])
                self._store.put(layout.rollouts(self._slot, self._generation, self._samples), body.encode())
                self._samples += 1
            except StoreError as error:
                print(f"{self._slot}: rollouts not written: {error}", file=sys.stderr, flush=True)


def read_journal(store: Store) -> Iterator[dict[str, Any]]:
    """Every event of a run with "slot" and "generation", in no particular order; damaged lines are skipped."""
    for key in store.list(layout.LOGS):
        if layout.is_rollouts(key):
            continue
        slot, generation = layout.log_owner(key)
        for line in (store.get(key) or b"").decode(errors="replace").splitlines():
            try:
                yield {**json.loads(line), "slot": slot, "generation": generation}
            except ValueError:
                continue


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    """Seven digits are enough; a Unix time among them keeps its milliseconds."""
    short = lambda v: round(v, 3) if abs(v) >= 1e6 else float(f"{v:.7g}")  # noqa: E731
    return {k: short(v) if isinstance(v, float) else v for k, v in fields.items()}
