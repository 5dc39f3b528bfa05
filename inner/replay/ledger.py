"""Record payments and answers, one per line, before and after every request.

    {"sent": 7, "call": "9f3a…", "state_id": "s4", "teacher": "m", "reserve_nano": 31000000}    then the request is sent
    {"back": 7, "call": "9f3a…", "cost_nano": 1200000, "answer": {…}, "why": ""}                its answer has come

    spent   = Σ cost of answered requests + Σ reserve of requests without an answer (the process died)
    fits    = spent + held + reserve ≤ ceiling            held: reserves of the requests in flight

A call is named by the digest of its request. If a call's answer is on disk, we never send the call or pay for it again.

Not promised: a single payment for a request in flight when the process died: we send and count the request twice.
"""

import asyncio
import fcntl
import json
import os
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

from inner.replay.teachers import NANO
from inner.replay.untrusted import load_json
from inner.settings.inner import InnerError

MOST_HOLDERS = 1000  # at most so many ledger names that a process tries


class CeilingReached(Exception):
    """The request no longer fits under the ceiling."""


class CostCeiling:
    """The ceiling. Money is held before a request is sent, and settled when its cost is known. Nano-dollars."""

    def __init__(self, ceiling_nano: int, spent_nano: int = 0) -> None:
        self.ceiling = ceiling_nano
        self.spent = spent_nano
        self.held = 0
        self._changed = asyncio.Condition()

    async def hold(self, reserve: int) -> None:
        """Hold a reserve as soon as it fits. Raises CeilingReached if it would not fit without other reserves."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.held == 0 or self._fits_ceiling(reserve))
            if not self._fits_ceiling(reserve):
                raise CeilingReached
            self.held += reserve

    async def settle(self, reserve: int, cost: int) -> None:
        async with self._changed:
            self.held -= reserve
            self.spent += cost
            self._changed.notify_all()

    def _fits_ceiling(self, reserve: int) -> bool:
        return self.spent + self.held + reserve <= self.ceiling


class LedgerError(InnerError):
    """The ledger cannot be used: it is damaged, another process holds it, or its disk is full."""


class LedgerHeld(LedgerError):
    """Another process writes to the ledger."""


class Ledger:
    """An append-only file. With path None, the ledger is only in memory, and is lost when the process ends."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path is not None else None
        self.answers: dict[str, dict[str, Any]] = {}
        self._booked = 0
        self._open_reserves: dict[int, int] = {}  # reserves of requests without an answer
        self._sent = 0
        self._whole = 0  # bytes of the file up to its last whole line
        self._file = _open_alone(self.path) if self.path is not None else None
        if self._file is not None:
            try:
                self._read_lines(self._file)
            except BaseException:
                self._file.close()
                raise

    @property
    def spent_nano(self) -> int:
        """Nano-dollars spent by all processes with this ledger; a request without an answer counts as its reserve."""
        return self._booked + sum(self._open_reserves.values())

    def record_sent(self, call: str, state_id: str, teacher: str, reserve: int) -> int:
        line = {"sent": self._sent + 1, "call": call, "state_id": state_id, "teacher": teacher, "reserve_nano": reserve}
        self._write(line)
        self._apply_line(line)
        return self._sent

    def record_answer(self, number: int, call: str, cost: int, answer: dict[str, Any] | None, why: str = "") -> None:
        """Record that a request is over.   answer: None: keep no answer, so that the call may be made again."""
        line = {"back": number, "call": call, "cost_nano": cost, "answer": answer, "why": why}
        self._apply_line(line)  # before writing: the cost counts even if the disk is full
        self._write(line)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        """Write a line in ASCII, because an answer may hold surrogates. On a full disk, remove the partial line."""
        if self._file is None:
            return
        raw = json.dumps(line).encode() + b"\n"
        try:
            if self._file.write(raw) != len(raw):
                raise OSError("the line was written in part")
            os.fsync(self._file.fileno())
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._cut_torn_line()
            raise LedgerError(
                f"{self.path} cannot be written to ({error}). Make room on its disk; the same call continues."
            ) from error
        self._whole += len(raw)

    def _cut_torn_line(self) -> None:
        with suppress(OSError, ValueError):
            os.ftruncate(cast(Any, self._file).fileno(), self._whole)

    def _read_lines(self, file: IO[bytes]) -> None:
        """Apply the lines of the file. Cut off an incomplete last line (the process was killed while writing)."""
        whole, _, torn = file.read().rpartition(b"\n")
        self._whole = len(whole) + 1 if whole else 0
        if torn:
            file.truncate(self._whole)
        for at, raw in enumerate(whole.splitlines(), 1):
            self._apply_line(self._parse_line(at, raw))

    def _apply_line(self, line: dict[str, Any]) -> None:
        if "sent" in line:
            self._sent = line["sent"]
            self._booked += self._open_reserves.pop(line["sent"], 0)  # a known number: two ledgers joined
            self._open_reserves[line["sent"]] = line["reserve_nano"]
            return
        self._open_reserves.pop(line["back"], None)
        self._booked += line["cost_nano"]
        if line["answer"] is not None:
            self.answers[line["call"]] = line["answer"]

    def _parse_line(self, at: int, raw: bytes) -> dict[str, Any]:
        try:
            line = load_json(raw)
            if not _is_line(line):
                raise ValueError("no ledger line")
            return line
        except ValueError as error:
            raise LedgerError(
                f"{self.path}, line {at} is not a ledger line: {raw[:80]!r}. The sum paid cannot be read from a "
                "damaged ledger: restore the file, or give another name to start anew."
            ) from error


def open_free_ledger(path: str | Path) -> Ledger:
    """Open the first of `hints.jsonl`, `hints.1.jsonl`, … that no other process holds."""
    path = Path(path)
    for n in range(MOST_HOLDERS):
        try:
            return Ledger(path if n == 0 else path.with_name(f"{path.stem}.{n}{path.suffix}"))
        except LedgerHeld:
            continue
    raise LedgerHeld(f"{MOST_HOLDERS} processes hold the ledgers {path} … Give each replica a folder of its own.")


def _is_line(line: Any) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("call"), str):
        return False
    if "sent" in line:
        return _is_count(line["sent"]) and _is_count(line.get("reserve_nano"))
    answer = line.get("answer", ...)
    kept = answer is None or (isinstance(answer, dict) and isinstance(answer.get("action"), str))
    return _is_count(line.get("back")) and _is_count(line.get("cost_nano")) and kept


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def call_digest(url: str, body: dict[str, Any]) -> str:
    """Return the name of a call: the same request to the same endpoint has the same name."""
    return sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


def to_usd(nano: int) -> float:
    return nano / NANO


def _open_alone(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b", buffering=0)  # no buffer that writes a failed line later
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise LedgerHeld(
            f"another replay is writing to {path}. Wait for it, or give this replay a ledger of its own."
        ) from error
    file.seek(0)
    return file
