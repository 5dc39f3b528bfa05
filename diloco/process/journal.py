"""The log of one replica's session for human readers: one small object of JSON lines per outer step.

    log/{slot}-{generation}/000000.jsonl, 000001.jsonl, …        {"at": …, "event": "step", "step": 3, "reward": 0.4, …}
    log/{slot}-{generation}/000000.rollouts.jsonl, …             rollouts of one outer step (inner/rollouts/sample.py)

A `kill -9` loses only the events since the last outer step.  A failed write never ends a replica.  Secrets of the
environment are masked (inner/masking.py).

Without a run key, any process with write access may have written an object there; with a run key, logs are sealed
(rendezvous/stores/signed.py).  Readers check the fields that they use, and count and skip a line that is no event.

Not promised: that an event is true, or that a line is complete.
"""

import json
import math
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from diloco.events import KINDS, WARNINGS
from diloco.units import is_reckonable, rounded
from inner.masking import secret_masker, secrets_here
from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.errors import StoreError
from rendezvous.records.records import Count, Step, UnixTime, Usd, Word
from rendezvous.records.schema import check_json_value, check_of, from_json
from rendezvous.store import Readable, Store


class Journal:
    """A collector of events; `flush` writes them as one object.  Warnings also go to stderr, at once."""

    def __init__(self, store: Store, clock: Clock, slot: str, generation: int) -> None:
        self._store = store
        self._clock = clock
        self._slot = slot
        self._generation = generation
        self._lines: list[str] = []
        self._written = 0
        self._pending_samples: list[dict[str, Any]] = []
        self._samples = 0
        self._lock, self._writing = threading.Lock(), threading.Lock()

    def emit(self, event: str, **fields: Any) -> None:
        """Add an event to the log.   Raises ValueError for a kind that diloco/events.py does not have."""
        if event not in KINDS:
            raise ValueError(f"{event!r} is not a kind of event; add it to KINDS in diloco/events.py")
        fields = {"at": round(self._clock.wall(), 3), "event": event, **rounded(fields)}
        line = secret_masker(secrets_here())(json.dumps(fields, default=str))
        if event in WARNINGS:
            print(f"{self._slot}-{self._generation} {line}", file=sys.stderr, flush=True)
        with self._lock:
            self._lines.append(line)

    def add_sample(self, step: int, sample: dict[str, Any]) -> None:
        """Keep a result of the inner loop's `sample`; the next flush writes it."""
        if sample:
            with self._lock:
                self._pending_samples.append({"step": step, **sample})

    def flush(self) -> None:
        with self._writing:  # one flush at a time; `emit` does not wait for it
            self._flush_samples()
            with self._lock:
                lines = self._lines
                self._lines = []
            if not lines:
                return
            try:
                body = "\n".join(lines).encode() + b"\n"
                self._store.put(layout.log_key(self._slot, self._generation, self._written), body)
                self._written += 1
            except StoreError as error:
                print(f"{self._slot}: log not written: {error}; trying again", file=sys.stderr, flush=True)
                with self._lock:
                    self._lines = lines + self._lines

    def _flush_samples(self) -> None:
        with self._lock:
            samples = self._pending_samples
            self._pending_samples = []
        for sample in samples:
            try:
                head = {k: v for k, v in sample.items() if k != "rollouts"}
                body = "".join(json.dumps(row) + "\n" for row in [head, *sample["rollouts"]])
                self._store.put(layout.rollouts_key(self._slot, self._generation, self._samples), body.encode())
                self._samples += 1
            except StoreError as error:
                print(f"{self._slot}: rollouts not written: {error}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Log:
    """One object of a log.   passed_over: number of lines that are not events."""

    events: list[dict[str, Any]]
    passed_over: int = 0


def read_log(store: Readable, key: str) -> Log:
    """Read the events of one log object."""
    lines = (store.get(key) or b"").decode(errors="replace").splitlines()
    events = [e for line in lines if (e := event_of(line)) is not None]
    return Log(events, len(lines) - len(events))


@dataclass(frozen=True)
class Event:
    """The fields that programs use; other fields are for human readers."""

    at: UnixTime
    event: Word
    slot: Word = ""
    generation: Count = 0
    step: Step | None = None
    pid: Count | None = None
    attempt: Count = 0
    executor: Word = ""
    state: Word = ""
    reason: str = ""
    exit_code: int | None = None
    code: int | None = None
    useful: bool = True
    own_fault: bool = False
    by_reward: bool = False
    counted: Count = 0
    reward_failures: Count = 0
    reward_limit: Count = 0
    again_in_s: float | None = None
    first: bool = False
    launched_at: UnixTime | None = None
    usd_per_hour: Usd | None = None
    handle: dict[str, Any] = field(default_factory=dict[str, Any])


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event in a line of a log; None for other lines.  Numbers without finite squares are left out."""
    try:
        raw = json.loads(line, parse_constant=lambda name: math.nan)
        if not isinstance(raw, dict):
            return None
        event = {k: v for k, v in raw.items() if is_reckonable(v)}
        if event.get("event") == "collected" and "text" in event:  # a session's end, in logs before 2026-11-28
            event["event"] = "outdated"
        from_json(Event, event)
        if event["event"] == "step":
            _check_numbers(event)
        return check_json_value(event)
    except (ValueError, RecursionError):
        return None


def rollout_line(line: str) -> dict[str, Any]:
    """Return the object in one line of rollouts.   Raises ValueError for other lines and for too large numbers."""
    raw = json.loads(line, parse_constant=_reach, parse_float=_reach, parse_int=_whole)
    if not isinstance(raw, dict):
        raise ValueError("it is not an object")
    return raw


def rollout_head(line: str) -> tuple[int, dict[str, Any]]:
    """Return (outer step, hints of tools) from the first line of a rollouts object.   Raises ValueError."""
    head = rollout_line(line)
    tools = head.get("tools")
    return check_of(Step)(head.get("step")), tools if isinstance(tools, dict) else {}


def _reach(text: str) -> float:
    if not is_reckonable(value := float(text)):
        raise ValueError(f"{text} is not a finite number of a normal size")
    return value


def _whole(text: str) -> int:
    if len(text) > 19:
        raise ValueError("a number of more than 18 digits")
    return int(text)


def _check_numbers(step: dict[str, Any]) -> None:
    """Raise ValueError unless a "step" event has numbers; only names and digests are text; reward may be null."""
    for name, value in step.items():
        if name not in ("event", "slot", "theta", "device", "reward") and not isinstance(value, int | float):
            raise ValueError(f"its {name} is not a number")
    if not isinstance(step.get("step"), int) or not all(isinstance(step.get(k, ""), str) for k in ("theta", "device")):
        raise ValueError("it names no outer step")
    if not isinstance(step.get("reward", 0.0), int | float | None):
        raise ValueError("its reward is not a number")
