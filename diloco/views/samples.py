"""Read a few completions per outer step from the replicas' logged rollouts.

    log/{slot}-{generation}/{n}.rollouts.jsonl      line 1: outer step, tools; then one rollout a line
      └─ from each session's newest object back to the first that is needed ──▶ table of row s, at most `most` rows

A session writes its rollouts of an outer step before its "step" event, so the rollouts of a complete row are there.

Not promised: any sample if fleet.log_rollouts is 0.
"""

import json
from collections import defaultdict
from itertools import chain, zip_longest
from typing import Any

from diloco.process.journal import rollout_head, rollout_line
from rendezvous import layout
from rendezvous.store import Readable

COLUMNS = ("step", "replica", "prompt", "completion", "reward")
MOST_CHARACTERS = 4000  # in one cell
Sample = tuple[int, str, str, str, float | None]


class SampleReader:
    """A reader of samples.   most: samples per outer step, over all replicas.   Usually reads each object once."""

    def __init__(self, store: Readable, most: int) -> None:
        self._store = store
        self._most = most
        self._seen = set[str]()
        self._first = 0  # the first row in memory: earlier rows were not read, or were forgotten
        self._samples = defaultdict[int, dict[str, list[Sample]]](dict)

    def read_from(self, row: int) -> None:
        """Read new samples of row `row` and of later rows; read all again if these rows were forgotten."""
        if row < self._first:
            self._seen.clear()
            self._samples.clear()
        self._first = row
        sessions = defaultdict[tuple[str, int], list[str]](list)
        for key in self._store.list(layout.LOGS) if self._most else []:
            owner = layout.log_owner(key)
            if layout.is_rollouts(key) and owner is not None and key not in self._seen:
                sessions[owner].append(key)
        for owner, keys in sessions.items():
            for key in sorted(keys, reverse=True):
                if not self._read(key, owner[0], row):
                    break
            self._seen |= set(keys)

    def samples_of(self, row: int) -> list[Sample]:
        """Return the samples of one row, alternating between replicas."""
        by_slot = self._samples.get(row, {})
        turns = zip_longest(*(by_slot[slot] for slot in sorted(by_slot)))
        return [sample for sample in chain.from_iterable(turns) if sample is not None][: self._most]

    def forget_before(self, row: int) -> None:
        """Drop the rows before this one, which are usually not needed again."""
        self._first = max(row, self._first)
        for old in [r for r in self._samples if r < row]:
            del self._samples[old]

    def _read(self, key: str, slot: str, first: int) -> bool:
        """Read one object of samples. Return whether the objects before it are needed, too."""
        row, found = _samples_in(self._store, key, slot, self._most)
        if row is not None and row >= first:
            self._samples[row].setdefault(slot, []).extend(found)
        return row is None or row >= first


def session_samples(store: Readable, slot: str, generation: int, most: int) -> list[Sample]:
    """Return a session's newest rollouts, the newest outer step first, and then the rollouts of its first object."""
    keys = sorted(key for key in store.list(layout.logs_prefix(slot, generation)) if layout.is_rollouts(key))
    newest = list[Sample]()
    while keys[1:] and len(newest) < most:
        newest += _samples_in(store, keys.pop(), slot)[1]
    return [*newest[:most], *(_samples_in(store, keys[0], slot)[1][:most] if keys else [])]


def _samples_in(store: Readable, key: str, slot: str, most: int | None = None) -> tuple[int | None, list[Sample]]:
    """Return the row in an object's first line, or None, and the samples in the next `most` lines."""
    head, *lines = (store.get(key) or b"").decode(errors="replace").splitlines() or [""]
    try:
        row = rollout_head(head)[0] + 1
    except (ValueError, RecursionError):
        return None, []
    return row, [found for line in lines[:most] if (found := _sample_of(line, row, slot)) is not None]


def _sample_of(line: str, row: int, slot: str) -> Sample | None:
    """Return a rollout as a row of the table; None if the line is not a rollout."""
    try:
        rollout = rollout_line(line)
        messages = rollout["messages"]
        first = rollout["first"]
        reward = rollout.get("reward")
        number = float(reward) if isinstance(reward, int | float) else None
        return row, slot, _text_of(messages[:first]), _text_of(messages[first:]), number
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _text_of(messages: list[dict[str, Any]]) -> str:
    """Return a single message's text; for several, each text with its role."""
    texts = [_content_of(m) for m in messages]
    if len(messages) != 1:
        texts = [f"[{m.get('role', '')}] {text}" for m, text in zip(messages, texts, strict=True)]
    whole = "\n".join(texts)
    return whole if len(whole) <= MOST_CHARACTERS else f"{whole[: MOST_CHARACTERS - 1]}…"


def _content_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    calls = message.get("tool_calls")
    text = content if isinstance(content, str) else "" if content is None else json.dumps(content)
    return f"{text} {json.dumps(calls)}".strip() if calls else text
