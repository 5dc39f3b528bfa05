"""DiLoCo's schedule over flat fragments, without torchft: macOS, Linux on ARM, Python 3.14.

    inner step  1 … H/F − τ        Δ = θ − flat ──▶ manager.allreduce       prepare_sync
                H/F                flat ← θ ◀── mean, should_commit         perform_sync
                                   θ ← outer step ─▶ flat ← θ + α · (local − θ)

torchft 0.2 has wheels only for Linux on x86-64 and Python up to 3.13.  Where it is installed, its own classes run.  The
classes here have the names of torchft's attributes that in_place.py and loop.py use, and give the same bits (a test
compares both).

Not promised: a lighthouse, several parameters in a fragment, values on a GPU; FlatFragments are on the CPU.
Sources: arXiv 2311.08105, algorithm 1; arXiv 2501.18512, sections 2.2 (fragments), 2.3 (τ, α).
"""

from collections.abc import Sequence
from typing import Any

import torch

from diloco.outer.flat import FlatFragment


class StreamingFragment:
    """One fragment, its θ (`original_parameters`) and its Δ (`_grads`)."""

    def __init__(self, manager: Any, fragment: FlatFragment, outer: torch.optim.Optimizer, alpha: float) -> None:
        self._manager, self._model_fragment = manager, fragment
        self._outer_optimizer, self._fragment_update_alpha = outer, alpha
        self.original_parameters = {"flat": fragment.flat.detach().clone()}
        self._grads = dict[str, torch.Tensor]()
        self._local_parameters = dict[str, torch.Tensor]()
        self._work: Any = None

    @torch.no_grad()
    def prepare_sync(self) -> None:
        """Compute Δ, and begin its average over the replicas."""
        self._save_grads()
        self._work = self._manager.allreduce(self._grads["flat"], should_quantize=False)

    @torch.no_grad()
    def perform_sync(self) -> None:
        """Wait for the mean, and take the outer step if the replicas agree on it; else go back to θ."""
        self._work.wait()
        self._save_local_parameters()
        self.restore_parameters()
        if self._manager.should_commit():
            self._model_fragment.flat.grad = self._grads.pop("flat")
            self._outer_optimizer.step()
            self.save_parameters()
            self._merge_parameters()
        self._outer_optimizer.zero_grad()
        self._local_parameters.clear()

    def _save_grads(self) -> None:
        self._grads["flat"] = self.original_parameters["flat"] - self._model_fragment.flat.data

    def _save_local_parameters(self) -> None:
        self._local_parameters["flat"] = self._model_fragment.flat.detach().clone()

    def restore_parameters(self) -> None:
        """Write flat ← θ."""
        self._model_fragment.flat.data.copy_(self.original_parameters["flat"])

    def save_parameters(self) -> None:
        """Write θ ← flat."""
        self.original_parameters["flat"].copy_(self._model_fragment.flat.data)

    def _merge_parameters(self) -> None:
        self._model_fragment.flat.data.lerp_(self._local_parameters["flat"], self._fragment_update_alpha)


class DiLoCo:
    """The schedule: one fragment after the other, each after H / F inner steps."""

    def __init__(
        self,
        manager: Any,
        fragments: Sequence[FlatFragment],
        inner: torch.optim.Optimizer,
        outers: Sequence[torch.optim.Optimizer],
        *,
        sync_every: int,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
    ) -> None:
        self._manager, self._inner = manager, inner
        self._sync_every, self._delay = sync_every // len(fragments), fragment_sync_delay
        self._local_step = 0
        self._hooks: list[Any] = []
        manager.register_state_dict_fn("StreamingDiLoCo", lambda state: None, dict)  # it refuses a second loop
        pairs = zip(fragments, outers, strict=True)
        self._fragments = [StreamingFragment(manager, one, outer, fragment_update_alpha) for one, outer in pairs]

    def __enter__(self) -> "DiLoCo":
        self._hooks = [self._inner.register_step_post_hook(self._after_step)]
        return self

    def __exit__(self, *_: object) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _after_step(self, *_: object) -> None:
        self._local_step += 1
        if self._local_step == self._sync_every - self._delay:
            self._manager.start_quorum()
            self._now().prepare_sync()
        if self._local_step == self._sync_every:
            self._now().perform_sync()
            self._local_step = 0

    def _now(self) -> StreamingFragment:
        """Return the fragment whose turn it is."""
        return self._fragments[self._manager.current_step() % len(self._fragments)]
