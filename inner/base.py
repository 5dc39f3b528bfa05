"""The interface between the inner loop and its driver: a config, seeds, and seven members.

    InnerConfig   plain data, JSON in and out; the defaults are the ones we would run
    Seeds         data (the order), start (where in it), noise (sampling)
    InnerLoop     model · optimizer · train(stop) · pop_metrics() · sample(n) · follow(step, θ) · report_to(host)
                  one inner step = one optimizer step

        build_inner ──▶ loop.train(stop) ──▶ optimizer.step() · stop()? · optimizer.step() · stop()! ──▶ returns
                                             └ hooks on loop.optimizer may read and rewrite loop.model here

The loop calls `stop` after every inner step. An exception of a hook leaves `train` unchanged.

Not promised: that `stop` is asked between generation boundaries only; a driver that wants whole generations counts in
multiples of `boundary`.

No torch here: configs are written and read on machines that never train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from math import gcd, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from inner.errors import FLOAT16, InnerError
from inner.lora_settings import LoraSettings
from inner.objectives import find_objective, po_settings
from inner.settings import ChannelSettings, refuse_unread

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from inner.host import Host

LOOPS = ("grpo", "supervised")
BUILT_IN_MODELS = ("toolworld", "tiny")
DTYPES = ("float32", "bfloat16")
POLICY_ONLY = ("loss_type", "scale_rewards", "epsilon", "epsilon_high")
ROLLOUTS_ONLY = (
    "gradient_checkpointing", "reward", "environment", "prompts", "num_generations", "max_completion_length",
    "max_tool_calling_iterations", "temperature", "vllm", "objective", "steps_per_generation", "num_iterations",
    "dynamic_sampling", "soft_overlong_tokens", "reward_retries", "reward_timeout_s", *POLICY_ONLY,
)  # fmt: skip
OBJECTIVE_KNOBS = (
    "loss_type",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "dynamic_sampling",
    "soft_overlong_tokens",
)

# "reward" | "environment" | "prompts" | "pairs" | "text" -> the local copy of the user's file
Files = Mapping[str, Path]
Theta = Callable[[], Iterable[tuple[str, "Tensor"]]]  # θ as committed, by parameter name


@dataclass(frozen=True)
class Seeds:
    """`data` fixes the order of the data, `start` is the first inner step to run in that order, `noise` the sampling.

    Two sessions of one slot share `data`; the second starts where the first stopped, with other noise."""

    data: int
    noise: int
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("data", "noise", "start"):
            if getattr(self, name) < 0:
                raise InnerError(f"Seeds.{name} is {getattr(self, name)}; it must be 0 or more.")


@dataclass(frozen=True)
class InnerConfig(ChannelSettings):
    """One inner loop. `None` means: the value we would run for this model (see the properties).

    The weights and knobs of the loss's channels are in inner/settings.py."""

    loop: str = "grpo"
    model: str = "toolworld"  # or "tiny" (supervised), a local folder, a Hub id
    revision: str | None = None
    dtype: str = "float32"
    lora: LoraSettings | None = None  # train an adapter, and leave the model as it is

    lr: float | None = None
    lr_warmup_steps: int = 0  # from inner step 0 of the data order
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.95
    max_grad_norm: float = 1.0
    batch_size: int = 32  # completions (grpo) or sequences (supervised) per forward and backward pass
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False

    text: str | None = None  # supervised: .txt, .npy (token ids) or .bin (uint16 token ids)
    context_length: int = 64

    reward: str | None = None  # "file.py:function", signature f(completions, **columns) -> list[float]
    reward_retries: int = 3  # further tries of a call that failed, before its completions count as None
    reward_timeout_s: float = 300.0  # of one call, for a whole batch; 0 for none
    environment: str | None = None  # "file.py:Class", TRL's environment: reset(**row), public methods are tools
    prompts: str | None = None  # .jsonl with a `prompt` column
    pairs: str | None = None  # .jsonl of preference pairs (DPOPair) for beta_replay
    num_generations: int = 8
    max_completion_length: int | None = None  # all turns together, tool results included
    max_tool_calling_iterations: int = 2
    temperature: float = 1.0
    vllm: bool = False  # generate with vLLM, in this process ("colocate"); TRL sends it the weights at each generation
    objective: str = "dr_grpo"  # a name of the menu: `diloco objectives`; None below is that objective's own value
    loss_type: str | None = None
    scale_rewards: str | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    dynamic_sampling: int | None = None  # further generations per batch, to replace groups whose rewards all agree
    soft_overlong_tokens: int | None = None  # the last tokens before max_completion_length, which cost reward
    steps_per_generation: int | None = None
    num_iterations: int = 1

    world_kinds: int = 6
    world_names: int = 32
    warm_start_steps: int = 450

    def __post_init__(self) -> None:
        if isinstance(self.lora, Mapping):  # as JSON has it
            object.__setattr__(self, "lora", LoraSettings(**self.lora))
        self.validate()

    @property
    def learning_rate(self) -> float:
        if self.lr is not None:
            return self.lr
        if self.model in BUILT_IN_MODELS:
            return 1e-3
        return 1e-6 if self.lora is None else 1e-4

    @property
    def completion_length(self) -> int:
        if self.max_completion_length is not None:
            return self.max_completion_length
        return 24 if self.model == "toolworld" else 512

    @property
    def generation_steps(self) -> int:
        """Micro-batches that one generation serves before TRL generates anew."""
        stale = find_objective(self.objective).stale if self.num_iterations == 1 else 1
        spg = self.steps_per_generation or stale * self.gradient_accumulation_steps
        return spg * self.num_iterations

    @property
    def generation_size(self) -> int:
        """Completions that one generation makes: whole groups of num_generations, scored together."""
        return self.batch_size * (self.generation_steps // self.num_iterations)

    @property
    def objective_overrides(self) -> dict[str, Any]:
        """The objective's settings that the run overrides."""
        return {knob: value for knob in OBJECTIVE_KNOBS if (value := getattr(self, knob)) is not None}

    @property
    def compares_with_start(self) -> bool:
        """Does the loss need θ₀ all along?   The reference of DPO, a KL term, a frozen teacher."""
        if self.loop != "supervised" and po_settings(self.objective, self.objective_overrides).get("beta"):
            return True
        reference = self.uses_replay and self.dpo_variant == "dpo"
        return reference or (self.uses_sdpo and self.sdpo_teacher == "frozen")

    @property
    def boundary(self) -> int:
        """Inner steps from one fresh generation to the next."""
        if self.loop == "supervised":
            return 1
        return max(1, self.generation_steps // self.gradient_accumulation_steps)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InnerConfig:
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(values) - known):
            raise InnerError(f"[inner] has no setting {', '.join(unknown)}. Valid: {', '.join(sorted(known))}.")
        return cls(**values)

    def validate(self) -> None:
        """Raise InnerError if settings contradict each other, before anything is downloaded or rented."""
        self._check_names()
        self._check_positive()
        self.check_channels()
        self._check_pairs()
        if self.loop == "supervised":
            self._check_supervised()
        else:
            self._check_grpo()
            self._check_sdpo()
        self._check_unread()

    def _check_unread(self) -> None:
        """Settings that this run would never read, as check_channels does for those of the channels."""
        unread = partial(refuse_unread, self, error=InnerError)
        unread(ROLLOUTS_ONLY, is_read=self.loop != "supervised", condition='loop = "grpo"')
        unread(("text",), is_read=self.loop == "supervised", condition='loop = "supervised"')
        world = ("world_kinds", "world_names", "warm_start_steps")
        unread(world, is_read=self.model == "toolworld", condition='model = "toolworld"')
        unread(("revision",), is_read=self.model not in BUILT_IN_MODELS, condition="model is on the Hub")
        if self.vllm and self.lora is not None:
            raise InnerError(
                "vllm = True with [inner.lora]: TRL merges the adapter into the base and takes it out again at each "
                "generation, which does not give all bits of the base back. Leave inner.vllm out, or train the whole "
                "model."
            )
        unread(POLICY_ONLY, is_read=self.policy_weight > 0, condition="policy_weight is above 0")

    def _check_names(self) -> None:
        _one_of("loop", self.loop, LOOPS)
        if self.dtype == "float16":
            raise InnerError(FLOAT16.format('dtype = "float16"'))
        _one_of("dtype", self.dtype, DTYPES)
        find_objective(self.objective)

    def _check_positive(self) -> None:
        positive = (
            "batch_size",
            "gradient_accumulation_steps",
            "context_length",
            "temperature",
            "num_iterations",
        )
        positive += (
            "world_kinds",
            "world_names",
            "warm_start_steps",
            "learning_rate",
        )
        positive += ("completion_length", "generation_steps")
        for name in positive:
            if not (isfinite(value := getattr(self, name)) and value > 0):
                raise InnerError(f"{name} = {value} must be greater than 0. Set inner.{name}.")
        for name in (
            "weight_decay",
            "max_grad_norm",
            "lr_warmup_steps",
            "max_tool_calling_iterations",
            "reward_retries",
            "reward_timeout_s",
        ):
            if not (isfinite(value := getattr(self, name)) and value >= 0):
                raise InnerError(f"{name} = {value} must be 0 (off) or more. Set inner.{name}.")

    def _check_supervised(self) -> None:
        if self.text is None:
            raise InnerError(
                'loop = "supervised" has no text to learn from. Set inner.text to a .txt, .npy or .bin file.'
            )
        if Path(self.text).suffix not in (".txt", ".npy", ".bin"):
            raise InnerError(
                f"text = {self.text!r} is not a .txt, .npy or .bin file, so we cannot tell how to read it. Convert it, "
                "or rename it if it is plain text."
            )
        if self.model == "toolworld":
            raise InnerError(
                'model = "toolworld" only knows its own 200 words. For loop = "supervised" set inner.model = "tiny" '
                "(bytes), a local folder or a Hub id."
            )
        if self.uses_sdpo or self.uses_replay:
            raise InnerError(
                f"alpha_sdpo = {self.alpha_sdpo} and beta_replay = {self.beta_replay} are terms beside a policy loss, "
                'and loop = "supervised" has no rollouts. Set inner.loop = "grpo", or both to 0.'
            )

    def _check_grpo(self) -> None:
        if self.model == "tiny":
            raise InnerError(
                'model = "tiny" has no chat template. Set inner.loop = "supervised" or another inner.model.'
            )
        if self.num_generations < 2:
            raise InnerError(
                f"num_generations = {self.num_generations}: a reward is compared within its group, so a group needs 2 "
                "or more completions. Set inner.num_generations to 8."
            )
        self._check_groups()
        micro = self.generation_steps
        ga = self.gradient_accumulation_steps
        if micro % ga and ga % micro:
            raise InnerError(
                f"steps_per_generation * num_iterations = {micro} and gradient_accumulation_steps = {ga} do not divide "
                "each other, so generations would end inside an inner step. Make one a multiple of the other."
            )
        po_settings(self.objective, self.objective_overrides)
        if self.model not in BUILT_IN_MODELS:
            self._check_own_task()

    def _check_groups(self) -> None:
        """TRL scores a whole generation at once, so it is the generation that must hold whole groups."""
        if self.generation_size % self.num_generations == 0:
            return
        per_generation = self.generation_steps // self.num_iterations
        fitting = self.num_generations // gcd(self.batch_size, self.num_generations)
        raise InnerError(
            f"one generation makes batch_size = {self.batch_size} · steps_per_generation = {per_generation} "
            f"completions (without a setting of its own, steps_per_generation is gradient_accumulation_steps), which "
            f"is not a multiple of num_generations = {self.num_generations}, so a group would be torn apart. Set "
            f"inner.batch_size to {self.num_generations} or a multiple of it, or inner.steps_per_generation to "
            f"{fitting} or a multiple of it."
        )

    def _check_own_task(self) -> None:
        if self.prompts is None:
            raise InnerError(
                f'model = "{self.model}" has no prompts. Set inner.prompts to a .jsonl file with a `prompt`.'
            )
        if self.reward is None and self.environment is None:
            raise InnerError(
                f'model = "{self.model}" has no reward. Set inner.reward = "file.py:function", or inner.environment to '
                "a class with `get_reward`."
            )

    def _check_sdpo(self) -> None:
        if not self.uses_sdpo:
            return
        has_tools = self.environment is not None or self.model == "toolworld"
        if self.sdpo_context == "hint" and (not has_tools or self.max_tool_calling_iterations == 0):
            raise InnerError(
                f"alpha_sdpo = {self.alpha_sdpo} learns at tool errors, and this run can never report one (environment "
                f"= {self.environment}, max_tool_calling_iterations = {self.max_tool_calling_iterations}). Set "
                'inner.environment, inner.sdpo_context = "rollout", or inner.alpha_sdpo = 0.'
            )
        if self.may_collapse:
            raise InnerError(
                f"alpha_sdpo = {self.alpha_sdpo} with the live teacher collapses (measured: reward .94 to 0). Set "
                'inner.alpha_sdpo to .1 or less, or inner.sdpo_teacher = "round" or "frozen".'
            )

    def _check_pairs(self) -> None:
        if self.uses_replay and self.pairs is None:
            raise InnerError(
                f"beta_replay = {self.beta_replay} has no pairs to learn from. Set inner.pairs to the .jsonl that "
                "`save_pairs` wrote, or inner.beta_replay = 0."
            )
        if self.pairs is not None and not self.uses_replay:
            raise InnerError(
                f"pairs = {self.pairs!r} with beta_replay = 0 would teach nothing. Set inner.beta_replay, or leave "
                "inner.pairs out."
            )


class InnerLoop(Protocol):
    """The members that a driver may use. `optimizer` is the raw torch optimizer: drivers register their hooks there."""

    model: nn.Module
    optimizer: Optimizer
    boundary: int

    def follow(self, step: Callable[[], int], theta: Theta) -> None:
        """Give the loop access to the run: its committed outer step, and θ of that step by parameter name.

        The loop calls both when it needs them."""
        ...

    def report_to(self, host: Host) -> None:
        """From now on, report failures of the user's own code to `host` (inner/host.py)."""
        ...

    def train(self, stop: Callable[[], bool]) -> None:
        """Run inner steps until `stop()` is true."""
        ...

    def pop_metrics(self) -> dict[str, float]:
        """Means since the last pop_metrics; "samples" is a count since then."""
        ...

    def sample(self, n: int) -> dict[str, Any]:
        """At most n of the rollouts since the last sample, as plain data to write down; {} where there are none."""
        ...


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise InnerError(f"{name} = {value!r} is not known. Set inner.{name} to one of: {', '.join(valid)}.")
