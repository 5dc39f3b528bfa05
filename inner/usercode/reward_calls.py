"""Call the rewards in a replica. One failure of the user's code does not end the session.

    called once ── fails ──▶ called again, for parts and with pauses (inner/usercode/attempts.py)
                   ├ no number, and the completion is to blame: inner.rewards.broken sets its reward (decision 065)
                   └ no number, for another reason: it counts as None and has no advantage (decision 025)

    a batch without any reward is not an inner step (skip_rewardless): no weight moves, no step is counted
                      ── if it is a session's first batch, or the third in a row ──▶ RewardFailed: this session ends

A reward that works is called once with TRL's own arguments, so all numbers are TRL's, bit for bit. The reward has
passed the checks before the run, so nothing here raises InnerError.

Not promised: to end an async reward that blocks its event loop; the watchdog ends that session.
"""

import asyncio
import math
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer
from trl.trainer.utils import is_async_callable

from inner.errors import RewardFailed
from inner.usercode.attempts import Again, Answer, Ask, Failure, Scored, Values, plan_attempts, read_values, rows_of
from inner.usercode.broken import WORST, BrokenRewards
from inner.usercode.deadline import TimedOut, call_within, is_end, remind_after

if TYPE_CHECKING:
    from inner.host import Host

BATCHES = 3  # consecutive batches without any reward that end a session that has had rewards
EMIT_EVERY_S = 60.0  # a reward that fails often is reported once per interval
LOGGERS = {"log_extra", "log_metric"}  # logging functions that TRL passes to a reward
COPIED = {"prompts", "completions"}  # a reward may change its messages


class StandaloneHost:
    """The Host of a loop that belongs to no run."""

    owner = ("alone", "0", 0)

    def note(self, text: str) -> None: ...

    def emit(self, event: str, text: str, **fields: Any) -> None:
        warnings.warn(text, stacklevel=2)

    def rented(self, seconds: float, usd_per_hour: float | None) -> None: ...

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)


class RewardCalls:
    """All rewards of one trainer.   retries: further tries.   timeout_s: limit of one call; 0: no limit.
    group: completions per prompt.   host: receives notes and events.   broken: inner.rewards.broken.

    `take_failed`: completions of the last batch that lack a reward.  `take_missing`: their number since the last
    call."""

    def __init__(
        self,
        retries: int,
        timeout_s: float,
        group: int,
        clock: Callable[[], float],
        host: "Host | None" = None,
        broken: str | float = WORST,
    ) -> None:
        self.tries = retries + 1
        self.timeout_s = timeout_s
        self.group = group
        self.clock = clock
        self.host: Host = host or StandaloneHost()
        self.broken = BrokenRewards(broken)
        self.rewardless = False  # True if no completion since the last `optimizer.step` has a reward
        self._is_first = True  # whether the next `settle` is the first since the last `optimizer.step`
        self._missing = 0
        self._failed: set[int] = set()
        self._in_a_row = dict[str, int]()  # reward's name -> consecutive batches without any number
        self._worked: set[str] = set()
        self._counts = True  # False within `uncounted`
        self._silent = 0  # consecutive generations without any number, whether calls failed or returned None
        self._has_number = False  # whether a completion since the last check_known has a number
        self._noted = False
        self._last_emit_at = -math.inf
        self._unreported_failures = 0

    def wrap_reward(self, reward: Any, weight: float = 1.0, more: Mapping[str, Any] | None = None) -> Any:
        """Wrap a reward function for TRL. A reward model (nn.Module) is returned as it is.   weight: 0: logged only,
        so training does not wait for further tries.   more: the trainer's own columns at a call."""
        if isinstance(reward, nn.Module) or not callable(reward):
            return reward

        @wraps(reward, updated=())
        def sync(**columns: Any) -> list[float | None]:
            columns |= more or {}
            steps = self._plan_attempts(columns, weight)
            scored = _run_attempts(steps, lambda step: self._do_step(reward, columns, step))
            return self._finish_batch(reward, scored, weight)

        @wraps(reward, updated=())
        async def later(**columns: Any) -> list[float | None]:
            columns |= more or {}
            steps = self._plan_attempts(columns, weight)
            scored = await _run_attempts_async(steps, lambda step: self._do_step_async(reward, columns, step))
            return self._finish_batch(reward, scored, weight)

        return later if is_async_callable(reward) else sync

    def take_failed(self) -> list[int]:
        """Return the completions of the batch for which a reward gave no number, and count them as missing."""
        failed, self._failed = sorted(self._failed), set[int]()
        self._missing += len(failed)
        return failed

    def take_missing(self) -> int:
        """Return the number of completions without a full reward since the last call."""
        missing, self._missing = self._missing, 0
        return missing

    def settle(self, rewards_B_F: Tensor, weights_F: Tensor, group: int) -> Tensor:
        """Return the batch's rewards, with broken completions settled.   group: completions per prompt; 1 in [eval]."""
        known = rewards_B_F.clone()
        known[self.take_failed()] = math.nan  # an incomplete sum is not the user's reward
        settled = self.broken.settle(known, weights_F, group)
        nothing = bool(settled.isnan().all())
        self.rewardless = nothing and (self._is_first or self.rewardless)
        self._is_first, self._has_number = False, self._has_number or not nothing
        return settled

    def skip_rewardless(self, optimizer: Optimizer) -> None:
        """Skip `optimizer.step` if none of its batches has a reward: momentum alone would still move the weights."""
        step = optimizer.step

        @wraps(step)  # keeps the attributes that a schedule looks for
        def step_if_rewarded(*args: Any, **kwargs: Any) -> Any:
            self._is_first = True
            return None if self.rewardless else step(*args, **kwargs)

        optimizer.step = step_if_rewarded

    def check_known(self, names: Sequence[str]) -> None:
        """Raise RewardFailed at the third generation in a row without any reward. Call this after each generation."""
        self._silent = 0 if self._has_number else self._silent + 1
        self._has_number = False
        if self._silent < BATCHES:
            return
        from inner.usercode.reward_words import silent_text

        raise RewardFailed(silent_text(self._silent, names))

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Exclude completions inside the `with` from all counts, from `rewardless`, and from the lowest reward."""
        kept = self._missing, self.rewardless, self._is_first, self._has_number, self.broken.lowest
        self._counts = False
        try:
            yield
        finally:
            self._counts = True
            self._missing, self.rewardless, self._is_first, self._has_number, self.broken.lowest = kept

    # one step of a batch

    def _plan_attempts(self, columns: Mapping[str, Any], weight: float) -> Generator[Ask | Again, Answer, Scored]:
        return plan_attempts(len(columns["completions"]), self.group, self.tries if weight else 1)

    def _do_step(self, reward: Any, columns: Mapping[str, Any], step: Ask | Again) -> Answer:
        if isinstance(step, Again):
            self._note_failure(step, columns)
            return self.host.pause(step.pause_s) if step.pause_s else None
        call = _Call(reward, columns, step)
        try:
            return call.read_answer(
                call_within(self.timeout_s, call.call_now, lambda waited: self._note_waiting(reward, waited))
            )
        except BaseException as error:  # sys.exit(), or a library's own kind, as a Rust panic, must not end the replica
            if is_end(error):
                raise
            return Failure(error)

    async def _do_step_async(self, reward: Any, columns: Mapping[str, Any], step: Ask | Again) -> Answer:
        if isinstance(step, Again):
            self._note_failure(step, columns)
            return await asyncio.to_thread(self.host.pause, step.pause_s) if step.pause_s else None
        call = _Call(reward, columns, step)
        first = remind_after(self.timeout_s)
        reminder = asyncio.get_running_loop().call_later(first, self._note_waiting, reward, first)
        limit = asyncio.timeout(self.timeout_s or None)
        try:
            async with limit:
                return call.read_answer(await call.call_reward())
        except TimeoutError as error:
            return Failure(TimedOut(f"no answer within {self.timeout_s:g} s") if limit.expired() else error)
        except BaseException as error:
            task = asyncio.current_task()
            if is_end(error) or (isinstance(error, asyncio.CancelledError) and task and task.cancelling()):
                raise
            return Failure(error)
        finally:
            reminder.cancel()

    # notes and events

    def _note_waiting(self, reward: Any, waited: float) -> None:
        until = f"; interrupted after {self.timeout_s:g} s (inner.rewards.timeout_s)" if self.timeout_s else ""
        self._send_note(f"waits for the reward {reward_name(reward)}, {waited:.0f} s so far{until}")

    def _note_failure(self, step: Again, columns: Mapping[str, Any]) -> None:
        of = f"{step.missing} of {len(columns['completions'])} completions, try {step.number} of {self.tries}"
        wait = f"; again in {step.pause_s:.0f} s" if step.pause_s else ""
        self._send_note(f"reward failed: {step.failure.summary} ({of}){wait}")

    def _send_note(self, text: str) -> None:
        self._noted = True
        self.host.note(text)

    def _finish_batch(self, reward: Any, scored: Scored, weight: float) -> list[float | None]:
        values, failed = self.broken.note(scored) if weight else (scored.values, ())
        self._failed.update(failed)
        if scored.why:
            self._emit_failure(reward, scored, self.tries if weight else 1)
        for text in getattr(reward, "take_notes", list[str])():  # notes on the user's code (inner/usercode/apart.py)
            self.host.emit("warning", text)
        if self._noted:
            self._noted = False
            self.host.note("")
        if weight:
            self._refuse_rewardless(reward, scored)
        return values

    def _emit_failure(self, reward: Any, scored: Scored, tries: int) -> None:
        """Report a failed batch: the first one at once, then at most once a minute."""
        now = self.clock()
        self._unreported_failures = self._unreported_failures + 1
        if now - self._last_emit_at < EMIT_EVERY_S:
            return
        from inner.usercode.reward_words import failure_text

        text = failure_text(reward_name(reward), scored, tries=tries, batches=self._unreported_failures)
        self._last_emit_at = now
        self._unreported_failures = 0
        self.host.emit(
            "reward_failed", text,
            completions=len(scored.values), failed=len(scored.failed), tries=scored.tries,
        )  # fmt: skip

    def _refuse_rewardless(self, reward: Any, scored: Scored) -> None:
        """Raise RewardFailed if training would continue without rewards."""
        if not self._counts:
            return
        name = reward_name(reward)
        if len(scored.failed) < len(scored.values):
            self._in_a_row[name] = 0
            self._worked.add(name)
            return
        self._in_a_row[name] = count = self._in_a_row.get(name, 0) + 1
        if count >= (BATCHES if name in self._worked else 1):
            from inner.usercode.reward_words import explain_end

            raise RewardFailed(explain_end(name, reward, scored, batches=count)) from (
                scored.failure.error if scored.failure else None
            )


class _Call:
    """One call of the user's function. TRL gets the metrics that the function logs only after its end."""

    def __init__(self, reward: Any, columns: Mapping[str, Any], step: Ask) -> None:
        self._reward = reward
        self._step = step
        self._given = columns
        self._logs: list[tuple[str, tuple[Any, ...]]] = []
        chosen = columns if step.first else rows_of(columns, step.rows, len(columns["completions"]))
        self._columns = {n: _copied(v) if n in COPIED else [*v] if type(v) is list else v for n, v in chosen.items()}
        for name in LOGGERS & set(columns):
            self._columns[name] = lambda *logged, name=name: self._logs.append((name, logged))

    def call_reward(self) -> Any:
        return self._reward(**self._columns)

    def call_now(self) -> Any:
        answer = self.call_reward()
        return asyncio.run(answer) if asyncio.iscoroutine(answer) else answer  # an async function below a plain wrapper

    def read_answer(self, answer: Any) -> Values:
        values = read_values(answer, len(self._step.rows))
        for name, logged in self._logs if self._step.first else ():
            self._given[name](*logged)
        return values


def _copied(value: Any) -> Any:
    """Return a copy of messages. The copy has the same image objects."""
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return {key: _copied(one) for key, one in value.items()} if isinstance(value, dict) else value


def _run_attempts(steps: Generator[Ask | Again, Answer, Scored], do: Callable[[Ask | Again], Answer]) -> Scored:
    answer = None
    while True:
        try:
            answer = do(steps.send(answer))
        except StopIteration as end:
            return end.value


async def _run_attempts_async(
    steps: Generator[Ask | Again, Answer, Scored], do: Callable[[Ask | Again], Any]
) -> Scored:
    answer = None
    while True:
        try:
            step = steps.send(answer)
        except StopIteration as end:
            return end.value
        answer = await do(step)


def reward_name(reward: Any) -> str:
    return getattr(reward, "__name__", type(reward).__name__)
