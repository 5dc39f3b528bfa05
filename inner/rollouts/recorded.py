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

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor, nn

from inner.errors import InnerError
from inner.rollouts.at_once.environments import drawn_environments
from inner.rollouts.bundle import Bundle
from inner.rollouts.generation import GenerationTrainer
from inner.rollouts.toolloop import OnRollouts
from inner.settings.contradictions import UNCORRECTED

if TYPE_CHECKING:
    from inner.train.policy import PolicyTrainer

CLIP = 2.0  # largest importance weight of a token of an actor's rollout (truncated importance sampling)


class BundlePlace(NamedTuple):
    """The place of a bundle in its slot.   outer: the outer step that counts its inner steps."""

    outer: int
    generation: int
    bundle: int


Unfit = Callable[[Bundle], str]  # returns why this trainer cannot train on a bundle; "" if it can


class TooFar(str):
    """The reason for a bundle whose weights are too far from the present weights (drift.py)."""


class Places(Protocol):
    """A store of bundles."""

    def find(self, place: BundlePlace, unfit: Unfit) -> Bundle | None:
        """Return the first bundle of this place that fits."""
        ...

    def put(self, place: BundlePlace, made: Bundle, unfit: Unfit) -> Bundle:
        """Record `made`. Return the bundle in the store: `made`, or another process's bundle if it came first."""
        ...


def record_rollouts(trainer: "PolicyTrainer", places: Places) -> None:
    """Let the trainer find and record its rollouts in `places` from now on."""
    if getattr(trainer, "_is_vlm", False):
        raise InnerError("fleet.record_rollouts cannot record images yet. Leave it out for a model that reads images.")
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
        unfit = lambda bundle: why_unfit(self, inputs, bundle)  # noqa: E731
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
        batch = self._train_on(found, inputs)
        found.random.restore()
        return batch

    def _next_place(self) -> BundlePlace:
        served = self.args.steps_per_generation * self.num_iterations  # pyright: ignore
        outer, generation = self._committed_step(), self._step // served  # pyright: ignore
        before = self._newest
        self._newest = BundlePlace(outer, generation, before.bundle + 1 if before.generation == generation else 0)
        return self._newest

    def _make_bundle(self, inputs: Any, hear: OnRollouts | None = None) -> tuple[Bundle, Any]:
        """Return a bundle and its batch.   hear: gets the rollouts, which may not be trained on, for `on_rollouts`."""
        self._made, tell = {}, self.on_rollouts
        self.on_rollouts = hear
        try:
            batch = super()._generate_rollouts(inputs)
            return Bundle(**self._made), batch
        finally:
            self._made, self.on_rollouts = None, tell

    def _train_on(self, bundle: Bundle, inputs: Any) -> Any:
        self.replayed = bundle
        try:
            with _without_resets(drawn_environments(self, inputs)), self._corrected(bundle.logprobs is not None):
                return super()._generate_rollouts(inputs)
        finally:
            self.replayed = None

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
        if self.replayed is None:
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            if self._made is not None:
                first = self.accelerator.process_index * len(prompts)  # TRL has gathered the rewards of all ranks
                own = rewards[first : first + len(prompts)].cpu()  # this rank's rewards
                self._made |= {"prompts": list(prompts), "rewards": own, "names": list(self.reward_func_names)}
                self._made["weights"] = self.reward_weights.tolist()
                self._made["environments"] = self._batch_environments if self._multi_environment else None
            return rewards
        functions = self.reward_funcs
        self.reward_funcs = [_always(column) for column in self.replayed.rewards.T.tolist()]
        try:
            return super()._calculate_rewards(inputs, self.replayed.prompts, completions, completion_ids_list)
        finally:
            self.reward_funcs = functions


def why_unfit(trainer: Any, inputs: Sequence[Mapping[str, Any]], bundle: Bundle) -> str:
    """Return why a trainer cannot train on a bundle in the place of these rows' rollouts; "" if it can."""
    if len(inputs) != len(bundle.ids):
        return f"it has {len(bundle.ids)} rollouts, and this generation {len(inputs)}"
    if list(bundle.names) != list(trainer.reward_func_names):
        return f"its rewards are {', '.join(bundle.names)}; here they are {', '.join(trainer.reward_func_names)}"
    if (bundle.mask is not None) != bool(trainer.tools or trainer.agents):
        return "it has tool turns, and this trainer no tools, or the other way round"
    most = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().num_embeddings
    if not all(0 <= token < most for ids in (*bundle.prompt_ids, *bundle.ids) for token in ids):
        return f"it has tokens outside of the vocabulary of {most}"
    if any(len(ids) > trainer.max_completion_length for ids in bundle.ids):
        return f"it has completions of more than {trainer.max_completion_length} tokens"
    if bundle.logprobs is not None and (trainer.dynamic_sampling or trainer.loss_type in UNCORRECTED):
        return "it was sampled elsewhere, and this objective needs rollouts of its own weights"
    if bundle.logprobs is not None and has_dropout(trainer):
        return "it was sampled elsewhere, and inner.lora.dropout or inner.trl.disable_dropout keeps dropout in the loss"
    adds = trainer.environment_factories is not None
    if not all(_begins_as(prompt, row, adds) for prompt, row in zip(bundle.prompts, inputs, strict=True)):
        return "its prompts are those of other rows"
    if trainer.agents is None and not _renders(trainer, inputs, bundle):  # an agent writes prompts of its own
        return "its prompts have other tokens than this trainer gives them"
    if bundle.logprobs is None:
        return ""
    from inner.rollouts import drift

    if why := drift.why_uncorrected(trainer, bundle):
        return why
    off = drift.drift_of(trainer, bundle)
    return "" if off <= drift.FARTHEST else TooFar(f"it is {off:.2f} nats per token from the present weights")


def has_dropout(trainer: Any) -> bool:
    """Whether the loss of this trainer has dropout.  π_old has no dropout, so the ratio to it would be noise."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in trainer.model.modules())


def is_truncated(trainer: Any) -> bool:
    """Whether a trainer does not sample from the softmax of all tokens."""
    args = trainer.args
    kept = args.top_p < 1 or (args.top_k or 0) > 0 or (args.min_p or 0) > 0
    return bool(kept or args.repetition_penalty != 1 or args.generation_kwargs)


def _begins_as(prompt: Any, row: Mapping[str, Any], adds: bool) -> bool:
    """Whether a recorded prompt comes from this row.   adds: an environment may have appended to the last message."""
    asked = row.get("prompt", [{"role": "user", "content": ""}])  # TRL's prompt for a row without any
    if not prompt or not isinstance(prompt, list) or not isinstance(asked, list):
        return prompt == asked
    if not adds or not isinstance(prompt[-1], dict) or not asked:
        return _plain(prompt) == _plain(asked)
    before = asked[-1].get("content")
    own = [*prompt[:-1], {**prompt[-1], "content": before}]
    return _plain(own) == _plain(asked) and _starts_with(prompt[-1].get("content"), before)


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _starts_with(content: Any, before: Any) -> bool:
    """Whether `content` begins with `before`: a text with a text, or a list of parts with parts or a text."""
    if isinstance(content, str) and isinstance(before, str):
        return content.startswith(before)
    before = [{"type": "text", "text": before}] if isinstance(before, str) else before
    both = isinstance(content, list) and isinstance(before, list)
    return _plain(content[: len(before)] if both else content) == _plain(before)


def _renders(trainer: Any, inputs: Sequence[Mapping[str, Any]], bundle: Bundle) -> bool:
    """Whether this trainer renders the prompts as the recorded tokens.  Also True if the template reads the clock."""
    if "strftime_now" in str(trainer.chat_template or getattr(trainer.processing_class, "chat_template", "")):
        return True
    known = dict[str, list[int]]()
    for prompt, ids, row in zip(bundle.prompts, bundle.prompt_ids, inputs, strict=True):
        name = row.get("environment") if trainer._multi_environment else None
        key = f"{name}\n{json.dumps(prompt, default=str)}"
        if key not in known:
            try:
                known[key] = list(trainer._prompt_ids(prompt, name))
            except Exception:  # a template may raise any exception for messages from another process
                return False
        if known[key] != list(ids):
            return False
    return True


def _always(column: list[float]) -> Callable[..., list[float | None]]:
    return lambda **_: [None if reward != reward else reward for reward in column]


@contextmanager
def _without_resets(environments: Sequence[Any]) -> Iterator[None]:
    """Make `reset` do nothing inside a `with`: the recorded prompts have its observations."""
    quiet = [(one, vars(one).get("reset")) for one in environments if hasattr(one, "__dict__")]
    for one, _ in quiet:
        vars(one)["reset"] = lambda **_: None
    try:
        yield
    finally:
        for one, own in quiet:
            vars(one).pop("reset", None)
            vars(one).update({} if own is None else {"reset": own})
