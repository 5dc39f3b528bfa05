"""The values of a reward, made strict, where nothing else calls it (inner/usercode/reward_calls.py does in a run).

    one finite number per completion, or None for "cannot say"; else an error that names the function

Not promised: checks of a reward that is a model.
"""

from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, cast

from torch import nn

from inner.usercode.userfiles import checked_rewards


def guard_answers(reward: Any) -> Any:
    """Return the same reward, with its answers checked. TRL would take a NaN for "cannot say"."""
    if isinstance(reward, nn.Module) or not callable(reward):
        return reward
    name = getattr(reward, "__name__", type(reward).__name__)
    function = cast(Any, reward)

    def check(values: Any, kwargs: Any) -> list[float | None]:
        if isinstance(values, list | tuple):  # of scalars of numpy or torch, perhaps
            values = [value.item() if hasattr(value, "item") else value for value in values]
        return checked_rewards(values, len(kwargs["completions"]), name)

    @wraps(reward, updated=())
    def checked(*args: Any, **kwargs: Any) -> list[float | None]:
        return check(function(*args, **kwargs), kwargs)

    @wraps(reward, updated=())
    async def checked_later(*args: Any, **kwargs: Any) -> list[float | None]:
        return check(await function(*args, **kwargs), kwargs)

    return checked_later if iscoroutinefunction(reward) else checked
