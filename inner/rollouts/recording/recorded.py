"""Train on recorded rollouts if there are any; else let the trainer make rollouts, and record them.

    place = (t, g, k)      ──▶ found ──▶ TRL's own generation, with the recorded tokens, turns and rewards in it
    t outer step                 │ no
    g generation of the slot     ▼
    k its k-th bundle         generate ──▶ put ──▶ train (on another process's bundle, if it came first)

A bundle with log-probs was sampled elsewhere, by an actor (acting.py), perhaps with older weights.  Then we use TRL's
importance correction: each token's loss is multiplied by π_now / π_sampled, at most CLIP.

Only tokens, tool turns and rewards come from the bundle.  Log-probs, advantages, lessons and metrics are computed as
always, and the random states continue from those after the recorded generation.  So if the weights are equal, the
gradients are equal, bit for bit, and later generations are those that the first process would have made.

An evaluation records nothing.  Not promised: images; vLLM's random numbers; state that a user's code keeps between
calls, such as the random numbers of its rewards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from inner.rollouts.generation import GenerationTrainer
from inner.rollouts.recording.bundle import Bundle
from inner.rollouts.toolloop import OnRollouts

if TYPE_CHECKING:
    from inner.train.policy import PolicyTrainer

CLIP = 2.0  # largest importance weight of a token of an actor's rollout (truncated importance sampling)


class BundlePlace(NamedTuple):
    """The place of a bundle in its slot.   outer: the outer step that counts its inner steps."""

    outer: int
    generation: int
    bundle: int


Unfit = Callable[[Bundle], str]  # returns why this trainer cannot train on a bundle; "" if it can


class Places(Protocol):
    """A store of bundles."""

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        """Return the first bundle of this place that fits."""
        ...

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        """Record `made`. Return the bundle in the store: `made`, or another process's bundle if it came first."""
        ...


def can_record(trainer: "PolicyTrainer", *, in_shards: bool = False) -> bool:
    """Whether this trainer's rollouts can be recorded: no prompt has images, and each rank has a whole model."""
    return not in_shards and not getattr(trainer, "_is_vlm", False)


def record_rollouts(trainer: "PolicyTrainer", places: Places) -> None:
    """Let the trainer find and record its rollouts in `places` from now on."""
    kind: Any = type(trainer)
    trainer.__class__ = type(f"Recorded{kind.__name__}", (_Recorded, kind), {})
    recorded: Any = trainer
    recorded.places, recorded._newest = places, BundlePlace(-1, -1, -1)
    if not recorded.use_vllm:
        recorded.vllm_importance_sampling_correction = True
        recorded.vllm_importance_sampling_mode = "token_truncate"
        recorded.vllm_importance_sampling_clip_min, recorded.vllm_importance_sampling_clip_max = None, CLIP


class _Recorded(GenerationTrainer):
    """A trainer's methods that find and record rollouts in `places`."""

    places: Places
    _newest: BundlePlace
    _made: "dict[str, Any] | None" = None  # parts of the bundle that is being made

    def _generate_rollouts(self, inputs: Any) -> Any:
        if self._mode() == "eval":
            return super()._generate_rollouts(inputs)
        place = self._next_place()

        def unfit(bundle: Bundle) -> str:
            from inner.rollouts.recording.found import why_unfit

            return why_unfit(self, inputs, bundle)

        found = self.places.find(place, unfit)
        if found is None:
            counts, heard = self._metric_counts(), list[Any]()
            made, batch = self._make_bundle(inputs, lambda *rollouts: heard.append(rollouts))
            found = self.places.put(place, made, unfit)
            if found is made:
                if (tell := self.on_rollouts) is not None:
                    for rollouts in heard:
                        tell(*rollouts)
                return batch
            self._forget_metrics(counts)
        return self._train_on(found, inputs)

    def _next_place(self) -> BundlePlace:
        served = self.args.steps_per_generation * self.num_iterations  # pyright: ignore
        outer, generation = self._committed_step(), self._step // served  # pyright: ignore
        before = self._newest
        self._newest = BundlePlace(outer, generation, before.bundle + 1 if before.generation == generation else 0)
        return self._newest

    def _make_bundle(self, inputs: Any, hear: OnRollouts | None = None) -> tuple[Bundle, Any]:
        """Return a bundle and its batch.   hear: replaces `on_rollouts`, because another bundle may be used."""
        self._made, tell = {}, self.on_rollouts
        self.on_rollouts = hear
        try:
            batch = super()._generate_rollouts(inputs)
            return Bundle(**self._made), batch
        finally:
            self._made, self.on_rollouts = None, tell

    def _train_on(self, bundle: Bundle, inputs: Any) -> Any:
        from inner.rollouts.recording.found import replaying

        with replaying(self, bundle, inputs), self._corrected(bundle.logprobs is not None):
            return super()._generate_rollouts(inputs)

    def _policy_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        with self._corrected("importance_sampling_ratio" in inputs):
            return super()._policy_loss(model, inputs)

    @contextmanager
    def _corrected(self, is_due: bool) -> Iterator[None]:
        """Make TRL apply its importance correction inside a `with`: pretend that vLLM sampled."""
        own = self.use_vllm
        self.use_vllm = own or is_due
        try:
            yield
        finally:
            self.use_vllm = own

    # what a bundle is made of

    def _generate(self, prompts: list) -> Any:
        out = super()._generate(prompts)
        if self._made is not None:
            prompt_ids, ids, mask, completions, logprobs, *_ = out
            self._made |= {"prompt_ids": prompt_ids, "ids": ids, "mask": mask, "logprobs": logprobs}
            self._made["completions"] = completions
        return out

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._tool_call_loop(*args, **kwargs)
        if self._made is not None:
            self._made["calls"] = (out[4], out[5])
        return out

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        if self.replayed is not None:
            prompts = self.replayed.prompts  # with what an environment's reset appended
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self._made is not None:
            first = self.accelerator.process_index * len(prompts)  # TRL has gathered the rewards of all ranks
            own = rewards[first : first + len(prompts)].cpu()  # this rank's rewards
            self._made |= {"prompts": list(prompts), "rewards": own, "names": list(self.reward_func_names)}
            self._made |= {"weights": self.reward_weights.tolist(), "opened": self.agents and self.agents.prompts}
            self._made["environments"] = self._batch_environments if self._multi_environment else None
        return rewards
