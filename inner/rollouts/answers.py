"""Check a reward's values for a trainer without RewardCalls (a run uses inner/usercode/reward_calls.py).

    one finite number per completion, or None for "cannot say"; else an error that names the function

Not promised: checks of a reward that is a model.
"""

from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, cast

from torch import nn

from inner.usercode.userfiles import checked_rewards


def guard_answers(reward: Any) -> Any:
    """Wrap a reward so that its answers are checked. Without the check, TRL would read a NaN as "cannot say"."""
    if isinstance(reward, nn.Module) or not callable(reward):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    function = cast(Any, reward)

    def check(values: Any, kwargs: Any) -> list[float | None]:
        if isinstance(values, list | tuple):  # they may be numpy or torch scalars
            values = [value.item() if hasattr(value, "item") else value for value in values]
        return checked_rewards(values, len(kwargs["completions"]), name)

    @wraps(reward, updated=())
    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        return check(function(*args, **kwargs), kwargs)

    @wraps(reward, updated=())
    async def checked_later(*args: Any, **kwargs: Any) -> list[float | None]:
        return check(await function(*args, **kwargs), kwargs)

    return checked_later if iscoroutinefunction(reward) else checked
