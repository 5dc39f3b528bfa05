"""The reward as a replica of a fleet calls it: one bad moment of the user's code ends nothing.

    called once ── fails ──▶ asked again, by parts and with pauses (inner/attempts.py)
                   └ what still has no finite number counts as None: its completion has no advantage (decision 025)

    a batch without one reward ── the first of a life, or three in a row ──▶ RewardFailed: this life ends

A reward that works is called once with TRL's own arguments, so the numbers are TRL's, bit for bit. What passed the
pre-flight is not the user's mistake any more, so nothing here is an InnerError.

Not promised: an end of an async reward that blocks its event loop; the watchdog ends that life.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Generator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from torch import nn
from trl.trainer.utils import is_async_callable

from inner.attempts import Again, Answer, Ask, Failure, Scored, Value, Values, attempts, read_values, rows_of
from inner.deadline import TimedOut, remind_after, within
from inner.host import Host, Nobody
from inner.userfiles import user_lines

BATCHES = 3  # without any reward, one after the other, in a life that has seen rewards
TELL_EVERY_S = 60.0  # a reward that fails often is told once a minute, with the count
LOGGERS = {"log_extra", "log_metric"}  # functions that TRL hands to a reward


class RewardFailed(RuntimeError):
    """The reward gives no numbers any more. This life ends; its slot is started again, three times at most."""


class RewardCalls:
    """All rewards of one trainer.   retries: further tries.   timeout_s: of one call, 0 for none.   group: completions
    of one prompt.   host: who hears.

    `take_failed` and `missing` say what of the last batch, and of all since the last harvest, has no reward."""

    def __init__(
        self, retries: int, timeout_s: float, group: int, clock: Callable[[], float], host: Host | None = None
    ):
        self.tries, self.timeout_s, self.group, self.clock = retries + 1, timeout_s, group, clock
        self.host: Host = host or Nobody()
        self._missing = 0
        self._failed: set[int] = set()
        self._in_a_row = dict[str, int]()  # batches without any reward, by the reward's name
        self._worked: set[str] = set()
        self._noted = False
        self._told_at = -math.inf
        self._untold = 0

    def around(self, reward: Any) -> Any:
        """The same reward, for TRL.  One that is a model stays as it is."""
        if isinstance(reward, nn.Module) or not callable(reward):
            return reward

        @wraps(reward, updated=())
        def sync(**columns: Any) -> list[Value]:
            steps = self._begin(columns)
            return self._finish(reward, _run(steps, lambda step: self._do(reward, columns, step)))

        @wraps(reward, updated=())
        async def later(**columns: Any) -> list[Value]:
            steps = self._begin(columns)
            return self._finish(reward, await _run_later(steps, lambda step: self._do_later(reward, columns, step)))

        return later if is_async_callable(reward) else sync

    def take_failed(self) -> list[int]:
        """Completions of the batch whose reward, or one of whose rewards, is not known."""
        failed, self._failed = sorted(self._failed), set()
        self._missing += len(failed)
        return failed

    def take_missing(self) -> int:
        """Completions without a reward since the last time."""
        missing, self._missing = self._missing, 0
        return missing

    # one step of a batch

    def _begin(self, columns: Mapping[str, Any]) -> Generator[Ask | Again, Answer, Scored]:
        return attempts(len(columns["completions"]), self.group, self.tries)

    def _do(self, reward: Any, columns: Mapping[str, Any], step: Ask | Again) -> Answer:
        if isinstance(step, Again):
            self._note(step, columns)
            return self.host.pause(step.pause_s) if step.pause_s else None
        call = _Call(reward, columns, step)
        try:
            return call.read(within(self.timeout_s, call.make, lambda waited: self._remind(reward, waited)))
        except (Exception, SystemExit) as error:  # a reward that calls sys.exit() is no wish to end the replica
            return Failure(error)

    async def _do_later(self, reward: Any, columns: Mapping[str, Any], step: Ask | Again) -> Answer:
        if isinstance(step, Again):
            self._note(step, columns)
            return await asyncio.to_thread(self.host.pause, step.pause_s) if step.pause_s else None
        call = _Call(reward, columns, step)
        first = remind_after(self.timeout_s)
        reminder = asyncio.get_running_loop().call_later(first, self._remind, reward, first)
        limit = asyncio.timeout(self.timeout_s or None)
        try:
            async with limit:
                return call.read(await call.make())
        except TimeoutError as error:
            return Failure(TimedOut(f"no answer within {self.timeout_s:g} s") if limit.expired() else error)
        except (Exception, SystemExit) as error:
            return Failure(error)
        finally:
            reminder.cancel()

    # what is said

    def _remind(self, reward: Any, waited: float) -> None:
        until = f"; interrupted after {self.timeout_s:g} s (inner.reward_timeout_s)" if self.timeout_s else ""
        self._say(f"waits for the reward {_name(reward)}, {waited:.0f} s so far{until}")

    def _note(self, step: Again, columns: Mapping[str, Any]) -> None:
        of = f"{step.missing} of {len(columns['completions'])} completions, try {step.number} of {self.tries}"
        wait = f"; again in {step.pause_s:.0f} s" if step.pause_s else ""
        self._say(f"reward failed: {step.failure.words} ({of}){wait}")

    def _say(self, text: str) -> None:
        self._noted = True
        self.host.note(text)

    def _finish(self, reward: Any, scored: Scored) -> list[Value]:
        self._failed.update(scored.failed)
        if scored.why:
            self._tell(reward, scored)
        if self._noted:
            self._noted = False
            self.host.note("")
        self._judge(reward, scored)
        return scored.values

    def _tell(self, reward: Any, scored: Scored) -> None:
        """At once the first time, then once a minute."""
        now, self._untold = self.clock(), self._untold + 1
        if now - self._told_at < TELL_EVERY_S:
            return
        before = f"; {self._untold} batches with failures since this was last said" if self._untold > 1 else ""
        lost = f"{len(scored.failed)} of {len(scored.values)} completions count without a reward"
        self._told_at, self._untold = now, 0
        text = f"{_name(reward)}: {scored.why} ({lost} after {scored.tries} of {self.tries} tries){before}"
        self.host.tell(
            "reward_failed", text,
            completions=len(scored.values), failed=len(scored.failed), tries=scored.tries,
        )  # fmt: skip

    def _judge(self, reward: Any, scored: Scored) -> None:
        """Raises RewardFailed where going on would train on nothing."""
        name = _name(reward)
        if len(scored.failed) < len(scored.values):
            self._in_a_row[name] = 0
            self._worked.add(name)
            return
        self._in_a_row[name] = count = self._in_a_row.get(name, 0) + 1
        if count >= (BATCHES if name in self._worked else 1):
            raise RewardFailed(_verdict(reward, scored, count)) from (scored.failure.error if scored.failure else None)


class _Call:
    """One call of the user's function.  What it logs for a whole batch is passed on when it has ended well."""

    def __init__(self, reward: Any, columns: Mapping[str, Any], step: Ask) -> None:
        self._reward, self._step, self._given = reward, step, columns
        self._logs: list[tuple[str, tuple[Any, ...]]] = []
        self._columns = dict(columns) if step.first else rows_of(columns, step.rows, len(columns["completions"]))
        for name in LOGGERS & set(columns):
            self._columns[name] = lambda *said, name=name: self._logs.append((name, said))

    def make(self) -> Any:
        return self._reward(**self._columns)

    def read(self, answer: Any) -> Values:
        values = read_values(answer, len(self._step.rows))
        for name, said in self._logs if self._step.first else ():
            self._given[name](*said)
        return values


def _run(steps: Generator[Ask | Again, Answer, Scored], do: Callable[[Ask | Again], Answer]) -> Scored:
    answer = None
    while True:
        try:
            answer = do(steps.send(answer))
        except StopIteration as end:
            return end.value


async def _run_later(steps: Generator[Ask | Again, Answer, Scored], do: Callable[[Ask | Again], Any]) -> Scored:
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = await do(step)


def _name(reward: Any) -> str:
    return getattr(reward, "__name__", type(reward).__name__)


def _verdict(reward: Any, scored: Scored, batches: int) -> str:
    often = "the first batch of this life" if batches == 1 else f"{batches} batches in a row"
    shown = f"  {scored.why}"
    if scored.failure is not None:
        shown = user_lines(scored.failure.error, _file_of(reward))
    return (
        f"the reward {_name(reward)} gave no number for any completion of {often}, {scored.tries} tries each.\n"
        f"{shown}\n  This life ends, and its slot is started again. After three such lives in a row the run ends; "
        "`diloco resume` goes on from its last commit. More patience: inner.reward_retries, inner.reward_timeout_s."
    )


def _file_of(reward: Any) -> Path:
    try:
        return Path(inspect.getfile(inspect.unwrap(reward)))
    except TypeError:
        return Path("?")
