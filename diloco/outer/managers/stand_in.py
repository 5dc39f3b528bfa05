"""The methods of torchft's Manager that do nothing in a manager that follows another manager's decisions.

    Led (outer/ranks)        a rank that rank 0 leads          audit/inner.py     inner steps that are taken again

Not promised: allreduce and current_step, which both have in their own way.
"""

from typing import Any


class StandIn:
    """Methods that torchft calls, without an effect: every step may be taken, and no state is sent to peers."""

    _use_async_quorum = False  # torchft reads this private name; it must be falsy
    done_with_delta = True

    def start_quorum(self, *_: Any, **__: Any) -> None: ...
    def register_state_dict_fn(self, *_: Any) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...

    def should_commit(self, *_: Any, **__: Any) -> bool:
        return True
