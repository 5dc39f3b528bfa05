"""Ask every teacher about every state, concurrently and under a hard cost ceiling.

    state ─▶ worth asking? ─▶ tier 0 ─▶ do teachers settle it? ─▶ tier 1 ─▶ …
             (student_entropy)  │        (all with the student, or enough agree on something else)
                                ▼
               on disk already? ─▶ hold the worst case ─▶ record it ─▶ send ─▶ record the answer ─▶ settle
                                   (waits, or gives up at the ceiling)    └─ again: wait, then from `hold`

requests in flight per teacher ≤ 1 + permits; each answer that costs no more than the worst case adds a permit

exchange.py, with teachers.py, gives each request one outcome: "answer", "again", "failed" or "stop". A teacher that
asks for a wait longer than LONGEST_WAIT_S is closed: its other calls fail at once, without cost. The other teachers
continue. A later replay_trace with the same arguments asks the closed teacher again.

The first call to a teacher is sent alone. So a wrong key, address or price is found by one request, not by 200. Some
failures stop the replay (no credits, wrong key, HTML, endpoint down, a charge above the worst case): nothing more is
sent, but responses to requests in flight are still read and kept. The same call with the same ledger continues later.

Not promised: a total below the ceiling if an endpoint is honest at first and then charges more than your prices
for requests already in flight. The first such charge stops the replay. OpenRouter gets your prices and refuses
providers that cost more.
"""

import asyncio
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any

import httpx

from inner.network import network_words
from inner.replay.commands import Key, key_of
from inner.replay.exchange import send_and_read
from inner.replay.ledger import CeilingReached, CostCeiling, Ledger, LedgerError, call_digest, to_usd
from inner.replay.states import TraceState
from inner.replay.teachers import MOST_USD, NANO, Reading, Teacher, TeacherAction, request_body, worst_cost_nano
from inner.settings.inner import InnerError

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 120.0  # after a longer Retry-After, this replay does not ask the teacher again

Done = Callable[[TraceState, Sequence[TeacherAction]], bool]  # True: no further tier is needed


@dataclass(frozen=True)
class RequestClock:
    """Clock and sleep, in seconds.  In tests, `sleep` does not wait."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(frozen=True)
class Replay:
    """The teachers' actions, in the order of states and teachers. It is iterable. `counts`: requests by outcome."""

    actions: list[TeacherAction]
    spent_usd: float  # spent with this ledger, by all processes together
    ceiling_usd: float
    counts: Counter[str] = field(default_factory=Counter)  # keys: asked, from_ledger, at_ceiling, failed, not_unsure

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
    """The replay cannot continue. `.replay` holds the answers so far; the ledger has them, too."""

    def __init__(self, message: str, replay: Replay) -> None:
        super().__init__(message)
        self.replay = replay


async def replay_trace(
    states: Sequence[TraceState],
    teachers: Sequence[Teacher],
    max_total_usd: float,
    *,
    ledger: str | Path | Ledger | None = None,
    concurrency: int = 16,
    agreement_threshold: float = 2,
    key: str | Key | None = None,
    min_student_entropy: float | None = None,
    tries: int = 5,
    timeout_s: float = 120.0,
    progress: bool | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: RequestClock = RequestClock(),
) -> Replay:
    """Ask the teachers which actions they would take in the states. With a `ledger` file a killed replay can resume.

    min_student_entropy  ask only about states where the student's entropy is at least this (nats per token)
    agreement_threshold  with tiers: if this many teachers agree, no teacher of a further tier is asked
    key                  the part of a turn that is compared (commands.py); None: each state's `action_form` decides
    timeout_s            limit of one whole exchange, from the connection to the last byte
    progress             None: a progress bar if stderr is a terminal
    ledger               an open Ledger stays open
    transport, clock     httpx's transport, and the clock of the waits between tries; tests set both

    InnerError: an argument is wrong, and no request was sent. ReplayStopped: see above.
    """
    _check_settings(max_total_usd=max_total_usd, concurrency=concurrency, tries=tries, timeout_s=timeout_s)
    _check_asked(states, teachers, min_student_entropy)
    headers = {teacher.model: teacher.headers() for teacher in teachers}
    asked = [s for s in states if min_student_entropy is None or s.get("student_entropy", 0.0) >= min_student_entropy]
    for state in asked:
        key_of(key, state.get("action_form"))  # raises now for an unknown name
    _check_requests(asked, teachers[0])
    book = ledger if isinstance(ledger, Ledger) else Ledger(ledger)
    try:
        n = min(concurrency, max(1, len(asked) * len(teachers)))
        async with _open_clients(n, timeout_s, transport) as clients:
            cost_ceiling = CostCeiling(int(max_total_usd * NANO), book.spent_nano)
            dispatcher = _RequestDispatcher(
                clients, book, cost_ceiling, headers, tries=tries, timeout_s=timeout_s, clock=clock
            )
            dispatcher.counts["not_unsure"] = len(states) - len(asked)
            done = partial(is_settled, agreement_threshold=agreement_threshold, key=key)
            rows = await _ask_all(dispatcher, asked, teachers, done, progress)
    finally:
        if book is not ledger:
            book.close()
    replay = Replay(rows, to_usd(dispatcher.cost_ceiling.spent), max_total_usd, dispatcher.counts)
    if dispatcher.stopped:
        raise ReplayStopped(_stop_message(dispatcher.stopped, replay, book.path), replay)
    if dispatcher.counts["at_ceiling"]:
        log.warning("the ceiling is reached: %s", replay.summary())
    return replay


def tiers_of(teachers: Sequence[Teacher]) -> list[list[Teacher]]:
    """Group the teachers by tier, lowest tier first."""
    return [[t for t in teachers if t.tier == tier] for tier in sorted({t.tier for t in teachers})]


def is_settled(
    state: TraceState, actions: Iterable[TeacherAction], agreement_threshold: float, key: str | Key | None = None
) -> bool:
    """Whether no further tier is needed: all agree with the student, or enough agree on one action."""
    compared = key_of(key, state.get("action_form"))
    keys = [compared(a["action"]) if a["action"] else None for a in actions]
    if not keys or None in keys:
        return False
    votes = Counter(keys)
    return set(votes) == {compared(state["student_action"])} or max(votes.values()) >= agreement_threshold


async def _ask_all(
    dispatcher: "_RequestDispatcher",
    states: Sequence[TraceState],
    teachers: Sequence[Teacher],
    done: Done,
    progress: bool | None,
) -> list[TeacherAction]:
    from tqdm import tqdm

    shown = sys.stderr.isatty() if progress is None else progress
    with tqdm(total=len(states), unit="state", desc="teachers", disable=not shown) as bar:

        async def one(state: TraceState) -> list[TeacherAction]:
            rows = await _ask_state(dispatcher, state, tiers_of(teachers), done)
            money = dispatcher.cost_ceiling
            bar.set_postfix_str(f"${to_usd(money.spent):.2f} of ${to_usd(money.ceiling):.2f}", refresh=False)
            bar.update()
            return rows

        async with asyncio.TaskGroup() as group:
            dispatcher.group = group
            tasks = [group.create_task(one(state)) for state in states]
    return [row for task in tasks for row in task.result()]


async def _ask_state(
    dispatcher: "_RequestDispatcher", state: TraceState, tiers: list[list[Teacher]], done: Done
) -> list[TeacherAction]:
    rows: list[TeacherAction] = []
    for tier in tiers:
        answers = await asyncio.gather(*(dispatcher.ask(state, teacher) for teacher in tier))
        rows += [answer for answer in answers if answer is not None]
        if done(state, rows):
            break
    return rows


@asynccontextmanager
async def _open_clients(
    n: int, timeout_s: float, transport: httpx.AsyncBaseTransport | None
) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Open one client per request in flight. A shared pool would scan all its connections at every request."""
    timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s / 2))
    try:
        context = httpx.create_ssl_context()
        each = [httpx.AsyncClient(timeout=timeout, verify=context, transport=transport) for _ in range(n)]
    except (
        httpx.InvalidURL,
        ImportError,
        OSError,
    ) as error:  # of a proxy's address, of a SOCKS proxy, of SSL_CERT_FILE
        raise InnerError(f"no request can be sent from here: {network_words(error)}") from None
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(client) for client in each]


@dataclass(frozen=True)
class _Call:
    digest: str
    state_id: str
    teacher: Teacher
    body: dict[str, Any]


class _RequestDispatcher:
    """Send requests under the ceiling, and record them in the ledger. One per replay."""

    def __init__(
        self,
        clients: Sequence[httpx.AsyncClient],
        ledger: Ledger,
        cost_ceiling: CostCeiling,
        headers: dict[str, dict[str, str]],
        *,
        tries: int,
        timeout_s: float,
        clock: RequestClock,
    ) -> None:
        self.ledger = ledger
        self.cost_ceiling = cost_ceiling
        self.headers = headers
        self.tries = tries
        self.timeout_s = timeout_s
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self.stopped = ""
        self.group: asyncio.TaskGroup
        self._idle_clients = asyncio.LifoQueue[httpx.AsyncClient]()  # reuses the last client, whose connection is open
        for client in clients:
            self._idle_clients.put_nowait(client)
        self._in_flight: Counter[str] = Counter()
        self._earned_permits: Counter[str] = Counter()
        self._changed = asyncio.Condition()
        self._not_before: dict[str, float] = {}  # teacher -> earliest next request: a 429 delays all its calls
        self._closed: dict[str, Reading] = {}  # model -> its response that asks to wait above LONGEST_WAIT_S
        self._calls: dict[str, asyncio.Task[dict[str, Any] | None]] = {}

    async def ask(self, state: TraceState, teacher: Teacher) -> TeacherAction | None:
        """Return a teacher's answer, from the ledger or by a request; None if the ceiling or a stop prevents both."""
        body = request_body(teacher, state)
        digest = call_digest(teacher.url, body)
        answer = self.ledger.answers.get(digest)
        if answer is not None and digest not in self._calls:
            self.counts["from_ledger"] += 1
        elif answer is None:
            if digest not in self._calls:  # states with the same messages share one call
                call = _Call(digest, state["state_id"], teacher, body)
                self._calls[digest] = self.group.create_task(self._with_retries(call))
            answer = await self._calls[digest]
        if answer is None:
            return None
        return {"state_id": state["state_id"], "teacher": teacher.model, **answer}  # type: ignore[typeddict-item]

    async def _with_retries(self, call: _Call) -> dict[str, Any] | None:
        client = await self._idle_clients.get()
        try:
            for attempt in range(1, self.tries + 1):
                reading, answer = await self._send_once(client, call, attempt)
                if reading.verdict != "again":
                    return self._count_outcome(reading, answer)
                if call.teacher.model in self._closed or attempt == self.tries:
                    return self._give_up(call.teacher, reading)
                await self.clock.sleep(_retry_delay_s(reading, attempt))
        except CeilingReached:
            self.counts["at_ceiling"] += 1
        except LedgerError as error:  # a request that cannot be recorded must not be sent
            self._stop(str(error).removesuffix("."))
        finally:
            self._idle_clients.put_nowait(client)
        return None

    async def _send_once(
        self, client: httpx.AsyncClient, call: _Call, attempt: int
    ) -> tuple[Reading, dict[str, Any] | None]:
        teacher = call.teacher
        reserve = worst_cost_nano(call.teacher, call.body)
        cost = 0
        await self._acquire_permit(teacher, reserve)
        try:
            await self._wait_for_turn(teacher)
            if self.stopped or teacher.model in self._closed:
                return self._closed.get(teacher.model, NOT_SENT), None
            number = self.ledger.record_sent(call.digest, call.state_id, teacher.model, reserve)
            cost = reserve  # until the response states its cost
            started = time.monotonic()
            reading = await send_and_read(
                client, teacher, call.body, self.headers[teacher.model], timeout_s=self.timeout_s, now=time.time()
            )
            cost = reserve if reading.cost_nano is None else reading.cost_nano
            is_kept = reading.verdict == "answer" or (reading.verdict == "failed" and cost > 0)
            answer = _answer_record(reading, cost, time.monotonic() - started, attempt) if is_kept else None
            self._apply_reading(teacher, reading, cost, reserve)
            self.ledger.record_answer(number, call.digest, cost, answer, reading.why)
        finally:
            await self._release_permit(teacher, reserve, cost)
        return reading, answer

    def _apply_reading(self, teacher: Teacher, reading: Reading, cost: int, reserve: int) -> None:
        """Apply this response's consequences to all other requests before any of them can be sent."""
        if cost > reserve:
            self._stop(
                f"{teacher.model} charged ${to_usd(cost):.6f} for a request that costs at most ${to_usd(reserve):.6f} "
                f"at ${teacher.prompt_usd} and ${teacher.completion_usd} per million tokens: "
                "correct the teacher's prices"
            )
        elif reading.verdict == "stop":
            self._stop(f"{teacher.model} at {teacher.base_url} answered {reading.why}")
        elif reading.verdict == "answer":
            self._earned_permits[teacher.model] += 1
        elif reading.verdict == "again" and reading.after_s is not None:
            self._put_off(teacher, reading, reading.after_s)

    def _put_off(self, teacher: Teacher, reading: Reading, after_s: float) -> None:
        model = teacher.model
        if after_s <= LONGEST_WAIT_S:
            self._not_before[model] = max(self._not_before.get(model, 0.0), self.clock.now() + after_s)
        elif model not in self._closed:
            self._closed[model] = Reading("again", f"{reading.why} (asks to wait {after_s:.0f} s)", 0)
            log.warning(
                "%s asks to wait %.0f s (%s): it is not asked again now. The same call continues from there later.",
                *(model, after_s, reading.why),
            )

    def _count_outcome(self, reading: Reading, answer: dict[str, Any] | None) -> dict[str, Any] | None:
        if reading.verdict == "failed":
            self.counts["failed"] += 1
            return answer or _answer_record(reading)
        self.counts["asked"] += reading.verdict == "answer"
        return answer

    def _give_up(self, teacher: Teacher, reading: Reading) -> dict[str, Any]:
        self.counts["failed"] += 1
        if reading.unreachable:
            self._stop(f"{reading.why}, tried {self.tries} times: is the endpoint up, and is base_url right")
        if teacher.model not in self._closed:  # _put_off logged it already
            log.warning("%s gave no answer: %s", teacher.model, reading.why)
        return _answer_record(reading)

    def _stop(self, why: str) -> None:
        self.stopped = self.stopped or why

    async def _acquire_permit(self, teacher: Teacher, reserve: int) -> None:
        model = teacher.model
        async with self._changed:
            await self._changed.wait_for(lambda: self._has_permit(model))
            self._in_flight[model] += 1
        try:
            await self.cost_ceiling.hold(reserve)
        except BaseException:
            await self._release_permit(teacher, 0, 0)
            raise

    def _has_permit(self, model: str) -> bool:
        """Whether a waiting request may proceed. After a stop it may proceed, too, and then it ends."""
        return self._in_flight[model] <= self._earned_permits[model] or bool(self.stopped) or model in self._closed

    async def _release_permit(self, teacher: Teacher, reserve: int, cost: int) -> None:
        await self.cost_ceiling.settle(reserve, cost)
        async with self._changed:
            self._in_flight[teacher.model] -= 1
            self._changed.notify_all()

    async def _wait_for_turn(self, teacher: Teacher) -> None:
        while (left := self._not_before.get(teacher.model, 0.0) - self.clock.now()) > 0 and not self.stopped:
            await self.clock.sleep(left)


NOT_SENT = Reading("stop", "the replay has stopped", 0)


def _retry_delay_s(reading: Reading, attempt: int) -> float:
    """Return the seconds before the next try: as Retry-After asks, else 0.25, 0.5, 1, … 16 s."""
    return reading.after_s if reading.after_s is not None else min(16.0, 0.25 * 2 ** (attempt - 1))


def _answer_record(reading: Reading, cost: int = 0, seconds: float = 0.0, attempt: int = 0) -> dict[str, Any]:
    """Return the answer in the ledger's form; it has an `error` if no answer is usable.   cost: nano-dollars."""
    record = {
        "action": reading.action, "cost_usd": to_usd(cost), "estimated": reading.estimated,
        "seconds": round(seconds, 3), "attempts": attempt, "model": reading.model,
    }  # fmt: skip
    return record if reading.verdict == "answer" else {**record, "error": reading.why}


def _check_settings(*, max_total_usd: float, concurrency: int, tries: int, timeout_s: float) -> None:
    """Raise InnerError for a number that cannot work, before anything is spent."""
    if not 0 <= max_total_usd <= MOST_USD:
        raise InnerError(f"max_total_usd is {max_total_usd}: give the most you want to spend, in dollars.")
    if not (isfinite(timeout_s) and timeout_s > 0):
        raise InnerError(f"timeout_s is {timeout_s}: give the seconds that one whole answer may take.")
    if concurrency < 1 or tries < 1:
        raise InnerError(f"concurrency is {concurrency} and tries is {tries}: both must be 1 or more.")


def _check_asked(states: Sequence[TraceState], teachers: Sequence[Teacher], min_student_entropy: float | None) -> None:
    """Raise InnerError for missing teachers, duplicate names, and states that lack a needed entropy."""
    if not teachers:
        raise InnerError("there are no teachers: give one or more, for example DEFAULT_TEACHERS.")
    for what, names in (("teacher", [t.model for t in teachers]), ("state_id", [s["state_id"] for s in states])):
        twice = [name for name, n in Counter(names).items() if n > 1]
        if twice:
            raise InnerError(f"{what} {twice[0]!r} is there {names.count(twice[0])} times: each needs its own name.")
    silent = [s["state_id"] for s in states if "student_entropy" not in s]
    if min_student_entropy is not None and silent:
        raise InnerError(
            f"min_student_entropy is set, but {len(silent)} of {len(states)} states do not say how unsure the student "
            f"was (first: {silent[0]!r}). Pass them through inner.channels.state_entropy.measure_entropy (--entropy-of "
            "MODEL), or leave min_student_entropy out."
        )


def _check_requests(states: Sequence[TraceState], teacher: Teacher) -> None:
    """Raise InnerError for a state from which no valid request with a worst case can be made. One teacher is enough."""
    for state in states:
        try:
            body = request_body(teacher, state)
            json.dumps(body, allow_nan=False)
            worst_cost_nano(teacher, body)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise InnerError(
                f"state {state['state_id']!r} cannot be written as a request ({error!r:.120}). Give its messages and "
                "tools the form of chat completions."
            ) from error


def _stop_message(why: str, replay: Replay, ledger: str | Path | None) -> str:
    kept = f"kept in {ledger}; the same call continues from there" if ledger is not None else "in this error's .replay"
    return f"the replay stopped: {why}.\n  so far {replay.summary()}, {kept}."
