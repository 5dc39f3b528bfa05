"""The money and the answers, one line each, written before and after every request.

    {"sent": 7, "call": "9f3a…", "state_id": "s4", "teacher": "m", "reserve_nano": 31000000}    then the request leaves
    {"back": 7, "call": "9f3a…", "cost_nano": 1200000, "answer": {…}, "why": ""}                its answer is here

    spent   = Σ cost of what came back + Σ reserve of what was sent and never came back (the process died)
    fits    = spent + held + reserve ≤ ceiling            held: reserves of the requests in the air

A call is named by the digest of its request. An answer on disk is never asked for, and never paid, again.

Not promised: one payment for a request that was in the air when the process died. It is asked again, and counted twice.
"""

import asyncio
import fcntl
import json
import os
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

from inner.base import InnerError
from inner.replay.teachers import NANO


class CeilingReached(Exception):
    """This request does not fit under the ceiling any more."""


class Purse:
    """The ceiling: money is held before a request leaves and settled when its cost is known."""

    def __init__(self, ceiling_nano: int, spent_nano: int = 0) -> None:
        self.ceiling, self.spent, self.held = ceiling_nano, spent_nano, 0
        self._changed = asyncio.Condition()

    async def hold(self, reserve: int) -> None:
        """Waits while what others hold may come back. CeilingReached when waiting cannot help."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.held == 0 or self._fits(reserve))
            if not self._fits(reserve):
                raise CeilingReached
            self.held += reserve

    async def settle(self, reserve: int, cost: int) -> None:
        async with self._changed:
            self.held -= reserve
            self.spent += cost
            self._changed.notify_all()

    def _fits(self, reserve: int) -> bool:
        return self.spent + self.held + reserve <= self.ceiling


class Ledger:
    """Append-only. `path` None keeps it in memory: nothing survives the process."""

    def __init__(self, path: str | Path | None) -> None:
        self.path = Path(path) if path is not None else None
        self.answers: dict[str, dict[str, Any]] = {}
        self.spent_nano = 0  # by earlier lives of this ledger
        self._sent = 0
        self._file = _open_alone(self.path) if self.path is not None else None
        if self._file is not None:
            self._replay(self._file)

    def sent(self, call: str, state_id: str, teacher: str, reserve: int) -> int:
        self._sent += 1
        self._write(
            {"sent": self._sent, "call": call, "state_id": state_id, "teacher": teacher, "reserve_nano": reserve}
        )
        return self._sent

    def back(self, number: int, call: str, cost: int, answer: dict[str, Any] | None, why: str = "") -> None:
        """answer None: nothing to keep, the call may be made again."""
        self._write({"back": number, "call": call, "cost_nano": cost, "answer": answer, "why": why})
        if answer is not None:
            self.answers[call] = answer

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())

    def _replay(self, file: IO[bytes]) -> None:
        """Take in what is there. A torn last line (killed while writing) is cut off."""
        whole, _, torn = file.read().rpartition(b"\n")
        if torn:
            file.truncate(len(whole) + 1 if whole else 0)
        open_reserves: dict[int, int] = {}
        for at, raw in enumerate(whole.splitlines(), 1):
            line = self._line(at, raw)
            if "sent" in line:
                self._sent = line["sent"]
                open_reserves[line["sent"]] = line["reserve_nano"]
                continue
            open_reserves.pop(line["back"], None)
            self.spent_nano += line["cost_nano"]
            if line["answer"] is not None:
                self.answers[line["call"]] = line["answer"]
        self.spent_nano += sum(open_reserves.values())

    def _line(self, at: int, raw: bytes) -> dict[str, Any]:
        try:
            line = json.loads(raw)
            _ = line["reserve_nano"] if "sent" in line else (line["back"], line["cost_nano"], line["answer"])
            return line
        except (ValueError, KeyError, TypeError) as error:
            raise InnerError(
                f"{self.path}, line {at} is not a ledger line: {raw[:80]!r}. What was paid cannot be known from a "
                "damaged ledger: restore the file, or give another name to start anew."
            ) from error


def call_digest(url: str, body: dict[str, Any]) -> str:
    """The name of a call: the same request to the same endpoint has the same name."""
    return sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()


def usd(nano: int) -> float:
    return nano / NANO


def _open_alone(path: Path) -> IO[bytes]:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise InnerError(
            f"another replay is writing to {path}. Wait for it, or give this one a ledger of its own."
        ) from error
    file.seek(0)
    return file
