"""torchft's DiLoCo with five methods of its fragment replaced: Δ straight from the model, θ stepped in place.

    torchft                                                        here
    flat ◀── gather ── model                                       (flat is θ)
    Δ = original − flat                 a new tensor               Δ = θ − model, in reused memory
    local = clone(flat)                 a new tensor, for α        (α = 0)
    flat ◀── original, outer step, clone(flat) ──▶ original        outer step on θ

So torchft does not run unmodified here. Five methods, all internal to torchft 0.2, are ours: `_save_grads`,
`_save_local_parameters`, `_merge_parameters`, `restore_parameters` and `save_parameters`.  Hooks, schedule, order and
arithmetic are torchft's own. The resulting bits are the same (a test compares both classes).  Above 32 MB, malloc takes
fresh pages for every new tensor and gives them back; these pages took most of a sync's time on a CPU.  Only one
fragment is synced at a time, so all fragments share the memory of the largest Δ.

A machine for which torchft has no wheel takes streaming.py's classes in its place.

Not promised: α > 0, whose merge needs the local values after the step; a Manager whose collectives may still write
to Δ after its outer step (an aborted Gloo collective).  These cases use torchft's unmodified class.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diloco.outer.flat import FlatFragment, OuterError

if TYPE_CHECKING:
    from torchft.local_sgd import DiLoCo, _StreamingDiLoCoFragment
else:
    try:
        from torchft.local_sgd import DiLoCo, _StreamingDiLoCoFragment
    except ModuleNotFoundError as missing:
        if missing.name != "torchft":
            raise
        from diloco.outer.fragments.streaming import DiLoCo
        from diloco.outer.fragments.streaming import StreamingFragment as _StreamingDiLoCoFragment

__all__ = ["DiLoCo", "InPlaceDiLoCo"]


class InPlaceDiLoCo(DiLoCo):
    """torchft's `DiLoCo`, with InPlaceFragments over FlatFragments."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _refuse_another_torchft()
        most = max(f.original_parameters["flat"].numel() for f in self._fragments)
        room = torch.empty(most, dtype=torch.float32, device="cpu")
        for fragment in self._fragments:
            fragment.__class__ = InPlaceFragment  # torchft has no setting for this class
            fragment.lean(room)  # pyright: ignore[reportAttributeAccessIssue]


class InPlaceFragment(_StreamingDiLoCoFragment):
    """torchft's fragment, whose flat vector is θ itself."""

    def lean(self, room: Tensor) -> None:
        """Make θ the flat vector, and Δ a part of `room`.   room: a tensor as large as the largest Δ."""
        self._part: FlatFragment = self._model_fragment  # pyright: ignore[reportAttributeAccessIssue]
        self._theta = self._part.flat.data = self.original_parameters["flat"]
        self._delta = room[: self._theta.numel()]

    def _save_grads(self) -> None:
        self._grads["flat"] = self._part.delta(self._theta, self._delta)

    def _nothing(self) -> None:
        """Do nothing: flat is always θ."""

    _save_local_parameters = _merge_parameters = _nothing
    restore_parameters = save_parameters = _nothing  # pyright: ignore[reportAssignmentType]


def _refuse_another_torchft() -> None:
    """Raise OuterError if torchft renamed a method. torchft's own method would silently compute Δ = θ − θ = 0."""
    replaced = [
        name for name in vars(InPlaceFragment) if name not in ("lean", "_nothing") and not name.startswith("__")
    ]
    if missing := [name for name in replaced if not hasattr(_StreamingDiLoCoFragment, name)]:
        raise OuterError(f"this torchft has no {', '.join(missing)} in its fragments; use torchft 0.2")
