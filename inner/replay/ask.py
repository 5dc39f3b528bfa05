"""Every state to every teacher, at once, under a hard cost ceiling.

    state ─▶ worth asking? ─▶ tier 0 ─▶ do they settle it? ─▶ tier 1 ─▶ …
             (student_entropy)  │        (all with the student, or enough agree on something else)
                                ▼
               on disk already? ─▶ hold the worst case ─▶ write it down ─▶ send ─▶ write the answer down ─▶ settle
                                   (waits, or gives up at the ceiling)        └─ again: wait as told, then from `hold`

in the air with a teacher ≤ 1 + what it has answered at no more than the worst case

So the first call to a teacher goes alone: a wrong key, address or price is found out once, not 200 times. What stops
the replay (no credits, wrong key, HTML, endpoint down, more charged than the worst case) stops all sending; requests in
the air are still read and kept. The same call with the same ledger goes on from there.

Not promised: a total below the ceiling if an endpoint is honest at first and then charges more than our prices for what
is already in the air. The first such charge stops the replay. OpenRouter is told our prices and refuses dearer
providers.
"""

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import httpx
import tenacity

from inner.base import InnerError
from inner.replay.actions import action_key
from inner.replay.ledger import CeilingReached, Ledger, Purse, call_digest, usd
from inner.replay.states import TraceState
from inner.replay.teachers import (
    NANO,
    Reading,
    Teacher,
    TeacherAction,
    read_response,
    request_body,
    worst_cost_nano,
)

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 120.0  # a Retry-After beyond this fails the call: run again later


@dataclass(frozen=True)
class Replay:
    """The teachers' actions, in the order of states and teachers; iterate over it. The counts say what is missing."""

    actions: list[TeacherAction]
    spent_usd: float  # by this ledger, all its lives together
    ceiling_usd: float
    counts: Counter[str] = field(default_factory=Counter)  # asked, from_ledger, at_ceiling, failed, not_unsure

    def __iter__(self) -> Iterator[TeacherAction]:
        return iter(self.actions)

    def __len__(self) -> int:
        return len(self.actions)

    def summary(self) -> str:
        counted = ", ".join(f"{name.replace('_', ' ')} {n}" for name, n in sorted(self.counts.items()) if n)
        return (
            f"${self.spent_usd:.4f} of ${self.ceiling_usd:.2f}: {len(self.actions)} actions ({counted or 'no calls'})"
        )


class ReplayStopped(InnerError):
    """Nothing more can be asked. `.replay` is what there is; the ledger has it too."""

    def __init__(self, message: str, replay: Replay) -> None:
        super().__init__(message)
        self.replay = replay


async def replay_trace(
    states: Sequence[TraceState],
    teachers: Sequence[Teacher],
    max_total_usd: float,
    *,
    ledger: str | Path | None = None,
    concurrency: int = 16,
    agreement_threshold: float = 2,
    min_student_entropy: float | None = None,
    tries: int = 5,
    timeout_s: float = 120.0,
    progress: bool | None = None,
) -> Replay:
    """Ask the teachers what they would do in the states. Give a `ledger` file: a killed replay then resumes.

    min_student_entropy  ask only where the student was unsure (nats per token); the others cost nothing
    agreement_threshold  with tiers: this many teachers in agreement need no further tier
    progress             None: a bar if stderr is a terminal
    """
    _check(states, teachers, max_total_usd, min_student_entropy, concurrency, tries)
    headers = {teacher.model: teacher.headers() for teacher in teachers}
    asked = [s for s in states if min_student_entropy is None or s.get("student_entropy", 0.0) >= min_student_entropy]
    book = Ledger(ledger)
    try:
        async with _clients(min(concurrency, max(1, len(asked) * len(teachers))), timeout_s) as clients:
            desk = _Desk(clients, book, Purse(int(max_total_usd * NANO), book.spent_nano), headers, tries)
            desk.counts["not_unsure"] = len(states) - len(asked)
            rows = await _ask_all(desk, asked, teachers, agreement_threshold, progress)
    finally:
        book.close()
    replay = Replay(rows, usd(desk.purse.spent), max_total_usd, desk.counts)
    if desk.stopped:
        raise ReplayStopped(_stop_message(desk.stopped, replay, ledger), replay)
    if desk.counts["at_ceiling"]:
        log.warning("the ceiling is reached: %s", replay.summary())
    return replay


def tiers_of(teachers: Sequence[Teacher]) -> list[list[Teacher]]:
    """Cheapest tier first."""
    return [[t for t in teachers if t.tier == tier] for tier in sorted({t.tier for t in teachers})]


def settled(state: TraceState, actions: Iterable[TeacherAction], agreement_threshold: float) -> bool:
    """No need for the next tier: all are with the student, or enough of them agree on one thing."""
    keys = [action_key(a["action"]) if a["action"] else None for a in actions]
    if not keys or None in keys:
        return False
    votes = Counter(keys)
    return set(votes) == {action_key(state["student_action"])} or max(votes.values()) >= agreement_threshold


async def _ask_all(
    desk: "_Desk", states: Sequence[TraceState], teachers: Sequence[Teacher], threshold: float, progress: bool | None
) -> list[TeacherAction]:
    from tqdm import tqdm

    shown = sys.stderr.isatty() if progress is None else progress
    with tqdm(total=len(states), unit="state", desc="teachers", disable=not shown) as bar:

        async def one(state: TraceState) -> list[TeacherAction]:
            rows = await _ask_state(desk, state, tiers_of(teachers), threshold)
            bar.set_postfix_str(f"${usd(desk.purse.spent):.2f} of ${usd(desk.purse.ceiling):.2f}", refresh=False)
            bar.update()
            return rows

        async with asyncio.TaskGroup() as group:
            desk.group = group
            tasks = [group.create_task(one(state)) for state in states]
    return [row for task in tasks for row in task.result()]


async def _ask_state(
    desk: "_Desk", state: TraceState, tiers: list[list[Teacher]], threshold: float
) -> list[TeacherAction]:
    rows: list[TeacherAction] = []
    for tier in tiers:
        answers = await asyncio.gather(*(desk.ask(state, teacher) for teacher in tier))
        rows += [answer for answer in answers if answer is not None]
        if settled(state, rows, threshold):
            break
    return rows


@asynccontextmanager
async def _clients(n: int, timeout_s: float) -> AsyncIterator[list[httpx.AsyncClient]]:
    """One for each request in the air: a shared pool looks through all its connections at every request, squared."""
    timeout, context = httpx.Timeout(timeout_s, connect=10.0), httpx.create_ssl_context()
    async with AsyncExitStack() as stack:
        each = (httpx.AsyncClient(timeout=timeout, verify=context) for _ in range(n))
        yield [await stack.enter_async_context(client) for client in each]


@dataclass(frozen=True)
class _Call:
    digest: str
    state_id: str
    teacher: Teacher
    body: dict[str, Any]


class _Again(Exception):
    def __init__(self, reading: Reading) -> None:
        super().__init__(reading.why)
        self.reading = reading


class _Desk:
    """Sends requests and keeps the books. One per replay."""

    def __init__(
        self,
        clients: Sequence[httpx.AsyncClient],
        ledger: Ledger,
        purse: Purse,
        headers: dict[str, dict[str, str]],
        tries: int,
    ) -> None:
        self.ledger, self.purse, self.headers, self.tries = ledger, purse, headers, tries
        self.counts: Counter[str] = Counter()
        self.stopped = ""
        self.group: asyncio.TaskGroup
        self._free: asyncio.LifoQueue[httpx.AsyncClient] = (
            asyncio.LifoQueue()
        )  # last used first: its connection is open
        for client in clients:
            self._free.put_nowait(client)
        self._in_air: Counter[str] = Counter()
        self._honest: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._not_before: dict[str, float] = {}  # a 429 for one call holds for all calls to that teacher
        self._calls: dict[str, asyncio.Task[dict[str, Any] | None]] = {}

    async def ask(self, state: TraceState, teacher: Teacher) -> TeacherAction | None:
        """None: there is no answer and there was none to be had (ceiling, or the replay has stopped)."""
        body = request_body(teacher, state)
        digest = call_digest(teacher.url, body)
        answer = self.ledger.answers.get(digest)
        if answer is not None and digest not in self._calls:
            self.counts["from_ledger"] += 1
        elif answer is None:
            if digest not in self._calls:  # two states with the same messages are one call
                call = _Call(digest, state["state_id"], teacher, body)
                self._calls[digest] = self.group.create_task(self._with_retries(call))
            answer = await self._calls[digest]
        if answer is None:
            return None
        return {"state_id": state["state_id"], "teacher": teacher.model, **answer}  # type: ignore[typeddict-item]

    async def _with_retries(self, call: _Call) -> dict[str, Any] | None:
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self.tries),
            wait=_wait,
            retry=tenacity.retry_if_exception(lambda e: isinstance(e, _Again) and _soon(e.reading)),
            reraise=True,
        )
        client = await self._free.get()
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._once(client, call, attempt.retry_state.attempt_number)
        except CeilingReached:
            self.counts["at_ceiling"] += 1
        except _Again as error:
            return self._gave_up(call.teacher, error.reading)
        finally:
            self._free.put_nowait(client)
        return None

    async def _once(self, client: httpx.AsyncClient, call: _Call, attempt: int) -> dict[str, Any] | None:
        teacher, reserve, cost = call.teacher, worst_cost_nano(call.teacher, call.body), 0
        await self._take_off(teacher, reserve)
        try:
            await self._pause(teacher)
            if self.stopped:
                return None
            number = self.ledger.sent(call.digest, call.state_id, teacher.model, reserve)
            cost = reserve  # until we know better
            started = time.monotonic()
            reading = await self._send(client, call)
            cost = reserve if reading.cost_nano is None else reading.cost_nano
            answer = _answer(reading, cost, time.monotonic() - started, attempt)
            self.ledger.back(number, call.digest, cost, answer, reading.why)
            self._learn(teacher, reading, cost, reserve)
        finally:
            await self._land(teacher, reserve, cost)
        return self._outcome(reading, answer)

    async def _send(self, client: httpx.AsyncClient, call: _Call) -> Reading:
        teacher = call.teacher
        try:
            response = await client.post(teacher.url, json=call.body, headers=self.headers[teacher.model])
            return read_response(teacher, response.status_code, response.headers, response.text, time.time())
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
            return Reading("again", f"no connection to {teacher.url} ({error!r})", cost_nano=0, unreachable=True)
        except (httpx.TransportError, httpx.DecodingError) as error:  # sent, and nobody knows what became of it
            return Reading("again", f"the connection to {teacher.url} broke ({error!r})")

    def _learn(self, teacher: Teacher, reading: Reading, cost: int, reserve: int) -> None:
        """What this response means for all other requests, before any of them can go."""
        if cost > reserve:
            self._stop(
                f"{teacher.model} charged ${usd(cost):.6f} for a request that costs at most ${usd(reserve):.6f} at "
                f"${teacher.prompt_usd} and ${teacher.completion_usd} per million tokens: correct the teacher's prices"
            )
        elif reading.verdict == "stop":
            self._stop(f"{teacher.model} at {teacher.base_url} answered {reading.why}")
        elif reading.verdict == "answer":
            self._honest[teacher.model] += 1
        elif reading.after_s is not None:
            self._not_before[teacher.model] = time.monotonic() + reading.after_s

    def _outcome(self, reading: Reading, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        if reading.verdict == "again":
            raise _Again(reading)
        if reading.verdict == "failed":
            self.counts["failed"] += 1
            return answer or _failure(reading, 0.0)
        self.counts["asked"] += reading.verdict == "answer"
        return answer

    def _gave_up(self, teacher: Teacher, reading: Reading) -> dict[str, Any]:
        self.counts["failed"] += 1
        if reading.unreachable:
            self._stop(f"{reading.why}, tried {self.tries} times: is the endpoint up, and is base_url right")
        log.warning("%s gave no answer: %s", teacher.model, reading.why)
        return _failure(reading, 0.0)

    def _stop(self, why: str) -> None:
        self.stopped = self.stopped or why

    async def _take_off(self, teacher: Teacher, reserve: int) -> None:
        model = teacher.model
        async with self._changed:
            await self._changed.wait_for(lambda: self._in_air[model] <= self._honest[model] or bool(self.stopped))
            self._in_air[model] += 1
        try:
            await self.purse.hold(reserve)
        except BaseException:
            await self._land(teacher, 0, 0)
            raise

    async def _land(self, teacher: Teacher, reserve: int, cost: int) -> None:
        await self.purse.settle(reserve, cost)
        async with self._changed:
            self._in_air[teacher.model] -= 1
            self._changed.notify_all()

    async def _pause(self, teacher: Teacher) -> None:
        while (left := self._not_before.get(teacher.model, 0.0) - time.monotonic()) > 0:
            await asyncio.sleep(min(left, LONGEST_WAIT_S))


def _wait(retry: tenacity.RetryCallState) -> float:
    """As told by Retry-After; else 0.25, 0.5, 1, … 16 s."""
    error = retry.outcome.exception() if retry.outcome is not None else None
    after_s = error.reading.after_s if isinstance(error, _Again) else None
    return after_s if after_s is not None else min(16.0, 0.25 * 2 ** (retry.attempt_number - 1))


def _soon(reading: Reading) -> bool:
    return reading.after_s is None or reading.after_s <= LONGEST_WAIT_S


def _answer(reading: Reading, cost: int, seconds: float, attempt: int) -> dict[str, Any] | None:
    """What the ledger keeps: an answer, or a failure that was paid for."""
    if reading.verdict == "failed" and cost > 0:
        return _failure(reading, usd(cost)) | {"seconds": round(seconds, 3), "attempts": attempt}
    if reading.verdict != "answer":
        return None
    return {
        "action": reading.action,
        "cost_usd": usd(cost),
        "estimated": reading.estimated,
        "seconds": round(seconds, 3),
        "attempts": attempt,
        "model": reading.model,
    }


def _failure(reading: Reading, cost_usd: float) -> dict[str, Any]:
    known = {"cost_usd": cost_usd, "estimated": reading.estimated, "seconds": 0.0, "attempts": 0}
    return {"action": "", **known, "model": reading.model, "error": reading.why}


def _check(
    states: Sequence[TraceState],
    teachers: Sequence[Teacher],
    max_total_usd: float,
    min_student_entropy: float | None,
    concurrency: int,
    tries: int,
) -> None:
    """Everything that can be known to be wrong before the first cent."""
    if not (isfinite(max_total_usd) and max_total_usd >= 0):
        raise InnerError(f"max_total_usd is {max_total_usd}: give the most you want to spend, in dollars.")
    if not teachers:
        raise InnerError("there are no teachers: give one or more, for example DEFAULT_TEACHERS.")
    if concurrency < 1 or tries < 1:
        raise InnerError(f"concurrency is {concurrency} and tries is {tries}: both must be 1 or more.")
    for what, names in (("teacher", [t.model for t in teachers]), ("state_id", [s["state_id"] for s in states])):
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            raise InnerError(
                f"{what} {twice[0]!r} is there {names.count(twice[0])} times: each needs a name of its own."
            )
    silent = [s["state_id"] for s in states if "student_entropy" not in s]
    if min_student_entropy is not None and silent:
        raise InnerError(
            f"min_student_entropy is set, but {len(silent)} of {len(states)} states do not say how unsure the student "
            f"was (first: {silent[0]!r}). Write `student_entropy` into the states, or leave min_student_entropy out."
        )


def _stop_message(why: str, replay: Replay, ledger: str | Path | None) -> str:
    kept = f"kept in {ledger}; the same call goes on from there" if ledger is not None else "in this error's .replay"
    return f"the replay stopped: {why}.\n  so far {replay.summary()}, {kept}."
