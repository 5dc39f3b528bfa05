"""θ, Δ, H: torchft's DiLoCo over flat fp32 fragments of any model.

    model (any dtype) ── gather ──▶ flat fp32 fragment ── torchft: Δ = θ − flat ──▶ manager.allreduce
          ▲                                                                              │ mean
          └──── scatter ◀── m ← μm + ḡ,  θ ← θ − lr·(ḡ + μm)   (one rounding each) ◀─────┘
                             ḡ = 0: θ and m stay

    gather   flat = the model's values, without the rounding of its dtype (diloco/outer/flat.py)
    lean     for α = 0 on a bucket, Δ is read straight from the model and θ is stepped in place: five methods of
             torchft's fragment are replaced (fragments/in_place.py).  Otherwise torchft's DiLoCo runs unmodified
    torchft  or, on a machine for which it has no wheel, fragments/streaming.py
    hooks    on the inner optimizer, in this order:  ours (gather) · torchft's (sync) · ours (scatter, catch up)

Each fragment is one fp32 vector, also for a bf16 model, with one allreduce per sync. Fragments have tied weights once,
and no frozen weights. Each fragment has its own outer optimizer (a common one would apply stale inner gradients).

Not promised: that inner steps after the last sync are shared. If the `with` ends early, only this model has them.
"""

import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from diloco.events import TAKEN
from diloco.outer.flat import FlatFragment, ModelGuard, check_model, trainable_parameters
from diloco.outer.optimizer import Nesterov, OuterState
from diloco.run.config import OuterConfig, OuterError, check_boundary, cut_fragments
from rendezvous.errors import Leaving

if TYPE_CHECKING:
    from diloco.outer.managers.protocol import OuterManager


class OuterLoop:
    """The context manager of make_diloco; inside the block, the inner optimizer has its hooks."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        manager: "OuterManager",
        outer: OuterConfig,
        boundary: int = 1,
    ) -> None:
        check_model(model, optimizer)
        check_boundary(outer, boundary)
        self.manager, self.rounds = manager, manager.rounds
        self.model, self.optimizer, self.outer, self.boundary = model, optimizer, outer, boundary
        self.rules = rules = outer.rules  # with codec "auto", found.py sets the codec
        self.interval = rules.sync_every // rules.fragments  # inner steps between two syncs
        self.prepare_at = self.interval - outer.fragment_sync_delay
        self.overlaps = self.prepare_at < self.interval  # whether inner steps continue during a fragment's transfer
        self._is_plain = outer.lr == 1 and outer.momentum == 0 and not self.overlaps
        self.alpha = outer.fragment_update_alpha
        params = [p for _, p in trainable_parameters(model)]
        fragment = getattr(manager, "fragment", None) or _alone(manager)
        self.fragments = [fragment(params[s]) for s in cut_fragments([p.numel() for p in params], rules.fragments)]
        outers = [Nesterov(f.flat, lr=outer.lr, momentum=outer.momentum) for f in self.fragments]
        self.lean = self.rounds.done_with_delta and self.alpha == 0
        from diloco.outer.fragments.in_place import DiLoCo, InPlaceDiLoCo  # torchft takes a third of a second

        self.diloco = (InPlaceDiLoCo if self.lean else DiLoCo)(
            cast("Any", manager), list(self.fragments), optimizer, list(outers), sync_every=rules.sync_every,
            fragment_sync_delay=outer.fragment_sync_delay, fragment_update_alpha=self.alpha,
        )  # fmt: skip
        self.thetas = [f.original_parameters["flat"] for f in self.diloco._fragments]
        self.state = OuterState(self.thetas, outers)
        self.h = [0] * rules.fragments  # inner steps inside each fragment's Δ
        self._mark = time.monotonic()
        self._numbers: dict[str, list[float | Tensor]] = {}  # numbers that log() got since the last sync
        self._logs = False  # whether log() was called
        self._stale: int | None = None  # the fragment whose θ a caught-up step has changed
        self._hooks: list[Any] = []
        self._guard: ModelGuard | None = None

    def mathematics(self) -> dict[str, Any]:
        """The settings that all replicas of a run must share."""
        return {**asdict(self.outer), **asdict(self.rules)}

    def __enter__(self) -> "OuterLoop":
        self.rounds.join(self)
        self.rewrite_all()
        self._mark = time.monotonic()
        self._guard = ModelGuard(self.model)
        self._hooks.append(self.optimizer.register_step_post_hook(self._before_torchft))
        self.diloco.__enter__()
        self._hooks.append(self.optimizer.register_step_post_hook(self._after_torchft))
        self.rounds.watchdog.resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.rounds.watchdog.rest()
        self.diloco.__exit__(kind, error, trace)
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if kind is Leaving and self.manager.done:
            self.rewrite_all()
        if kind is None or kind is Leaving:
            self.rounds.close("done" if kind is None else self.rounds.why)
        return kind is Leaving

    def committed(self) -> int:
        """Return the number of outer steps taken."""
        return self.manager.current_step()

    def position(self) -> int:
        """Return the inner steps that one replica has taken by the run's count, in committed rounds and in this one."""
        return self.committed() * self.interval + self.diloco._local_step

    def progress(self, before: int, steps: int) -> dict[str, int]:
        """Return a TrainerState's global_step and max_steps.   before: outer steps of the parent.   steps: ours."""
        begin, end = before * self.interval, max(steps, self.committed() + 1) * self.interval
        return {"global_step": begin + self.position(), "max_steps": begin + end}

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Exclude the block, for example an evaluation, from the pace, from `sync_seconds` and from the logged
        seconds of inner steps."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._mark += seconds
            self.rounds.round_began += seconds

    def log(self, **numbers: "float | Tensor") -> None:
        """Log numbers of this inner step, e.g. loss=loss. `diloco status` and the report show the mean of each round
        ("samples": the sum).  A tensor is read at the sync, so log() does not wait for a device.   Raises OuterError.
        """
        if taken := sorted(TAKEN & set(numbers)):
            raise OuterError(f"log() got {', '.join(taken)}, which the outer loop itself logs; use another name")
        if not self._logs:
            self._logs = True
            others = self.rounds.stats
            self.rounds.stats = lambda: {**others(), **self._take_numbers()}
        for name, number in numbers.items():
            self._numbers.setdefault(name, []).append(number.detach() if isinstance(number, Tensor) else number)

    def _take_numbers(self) -> dict[str, float]:
        taken, self._numbers = self._numbers, {}
        sums = {name: (sum(map(float, values)), len(values)) for name, values in taken.items()}
        means = {name: total if name == "samples" else total / n for name, (total, n) in sums.items()}
        return {name: value for name, value in means.items() if math.isfinite(value)}

    def theta(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the committed θ by the model's parameter names and shapes.  Later steps overwrite these tensors."""
        names = iter(trainable_parameters(self.model))
        for fragment, theta in zip(self.fragments, self.thetas, strict=True):
            for (_, values), (name, _) in zip(fragment.shaped(theta), names, strict=False):
                yield name, values

    # ---------------------------------------------------------------- hooks

    def _before_torchft(self, *_: object) -> None:
        """Count the step, end the round early if necessary, and gather the fragment that torchft reads next."""
        self.rounds.watchdog.rest()
        self.h = [h + 1 for h in self.h]
        local = self.diloco._local_step + 1
        rate = self.rounds.progress(local, (time.monotonic() - self._mark) / local)
        if self.manager.done:
            raise Leaving("the run has all its outer steps, so no later outer step would count this inner step")
        if local < self.prepare_at and self._sync_now(local, rate):
            self.diloco._local_step, local = self.prepare_at - 1, self.prepare_at  # torchft has no public early sync
        elif self.prepare_at < local < self.interval and (self.rounds.leaving or self.rounds.fenced):
            self.diloco._local_step, local = self.interval - 1, self.interval  # end the round: take no more steps
        if local == self.prepare_at and self._guard is not None:
            self._guard.check()
        if not self.lean and (local == self.prepare_at or (local == self.interval and self.alpha > 0)):
            due = self.manager.current_step() % self.rules.fragments
            self.fragments[due].gather(self.thetas[due])

    def _sync_now(self, local: int, rate: float) -> bool:
        if self.rounds.leaving or self.rounds.fenced:
            return True
        enough = local * self.rules.fragments >= self.rounds.h_cap
        nearest = 0 < self.rules.sync_seconds <= (local + self.boundary / 2) * rate  # the nearest boundary to it
        return local % self.boundary == 0 and (enough or self.rounds.behind or nearest)

    def _after_torchft(self, *_: object) -> None:
        """Continue after torchft's outer step: model ← θ, then apply the steps committed without this replica."""
        fragment = self.rounds.finish_round()
        if fragment is not None:
            self.scatter(fragment)
            self.rounds.catch_up(self._offer_late)
            self._rewrite_stale()
            if self.manager.done and not (self._is_plain and self.rounds.alone):
                self.rewrite_all()  # other fragments may have inner steps that no Δ has
            self._mark = time.monotonic()
        self.rounds.watchdog.resume()

    def _offer_late(self, step: int) -> None:
        """Offer this replica's inner steps for a missed step, before that step is applied."""
        self._rewrite_stale()
        fragment = step % self.rules.fragments
        if self.h[fragment]:
            theta = self.thetas[fragment]
            delta = self.fragments[fragment].delta(theta, torch.empty_like(theta))
            self.rounds.offer(delta.numpy(), self.h[fragment])
        self._stale = fragment

    # ---------------------------------------------------------------- the model

    def scatter(self, fragment: int) -> None:
        """Write model ← this fragment after torchft's step (θ, or θ merged by α).

        With one replica and a plain average, θ equals the model's values except for rounding, so the model is not
        written: the replica takes the steps of a loop without this context, bit for bit.
        """
        if not (self._is_plain and self.rounds.alone):
            self.fragments[fragment].scatter(self.alpha > 0)
        self.h[fragment] = 0

    def rewrite(self, fragment: int) -> None:
        """Write model ← θ, after θ changed without torchft."""
        if not self.lean:  # a lean fragment's flat vector is θ
            self.fragments[fragment].flat.data.copy_(self.thetas[fragment])
        self.fragments[fragment].scatter(False)
        self.h[fragment] = 0

    def rewrite_all(self) -> None:
        """Write model ← θ. This undoes the inner steps since the last sync."""
        for fragment in range(len(self.fragments)):
            self.rewrite(fragment)

    def _rewrite_stale(self) -> None:
        if self._stale is not None:
            self.rewrite(self._stale)
        self._stale = None


def _alone(manager: "OuterManager") -> type[FlatFragment]:
    if "DILOCO_RANKS" in os.environ or (torch.distributed.is_available() and torch.distributed.is_initialized()):
        from diloco.outer.ranks.lead import refuse_unled

        refuse_unled(manager)
    return FlatFragment
