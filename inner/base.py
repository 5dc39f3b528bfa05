"""What the inner loop is to whoever drives it: a config, seeds, and four members.

    InnerConfig   plain data, JSON in and out; the defaults are the ones we would run
    Seeds         data (the order), start (where in it), noise (sampling)
    InnerLoop     model · optimizer · train(stop) · harvest()          one inner step = one optimizer step

        build_inner ──▶ loop.train(stop) ──▶ optimizer.step() · stop()? · optimizer.step() · stop()! ──▶ returns
                                             └ hooks on loop.optimizer may read and rewrite loop.model here

`stop` is asked after every inner step. Whatever a hook raises leaves `train` unchanged.

Not promised: that `stop` is asked between generation boundaries only; a driver that wants whole generations counts in
multiples of `boundary`.

No torch here: configs are written and read on machines that never train.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from inner.errors import InnerError
from inner.objectives import objective, po_settings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

LOOPS = ("grpo", "supervised")
BUILT_IN_MODELS = ("toolworld", "tiny")
DTYPES = ("float32", "bfloat16", "float16")
TEACHERS = ("frozen", "live")
OBJECTIVE_KNOBS = (
    "loss_type",
    "scale_rewards",
    "epsilon",
    "epsilon_high",
    "dynamic_sampling",
    "soft_overlong_tokens",
)

Files = Mapping[str, Path]  # "reward" | "environment" | "prompts" | "text" -> the local copy of the user's file


@dataclass(frozen=True)
class Seeds:
    """`data` fixes the order of the data, `start` is the first inner step to run in that order, `noise` the sampling.

    Two lives of one worker share `data`; the second starts where the first stopped, with other noise."""

    data: int
    noise: int
    start: int = 0

    def __post_init__(self) -> None:
        for name in ("data", "noise", "start"):
            if getattr(self, name) < 0:
                raise InnerError(f"Seeds.{name} is {getattr(self, name)}; it must be 0 or more.")


@dataclass(frozen=True)
class InnerConfig:
    """One inner loop. `None` means: the value we would run for this model (see the properties)."""

    loop: str = "grpo"
    model: str = "toolworld"  # or "tiny" (supervised), a local folder, a Hub id
    revision: str | None = None
    dtype: str = "float32"

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
    environment: str | None = None  # "file.py:Class", TRL's environment: reset(**row), public methods are tools
    prompts: str | None = None  # .jsonl with a `prompt` column
    num_generations: int = 8
    max_completion_length: int | None = None  # all turns together, tool results included
    max_tool_calling_iterations: int = 2
    temperature: float = 1.0
    objective: str = "dr_grpo"  # a name of the menu: `diloco objectives`; None below is that objective's own value
    loss_type: str | None = None
    scale_rewards: str | None = None
    epsilon: float | None = None
    epsilon_high: float | None = None
    dynamic_sampling: int | None = None  # further generations per batch, to replace groups whose rewards all agree
    soft_overlong_tokens: int | None = None  # the last tokens before max_completion_length, which cost reward
    steps_per_generation: int | None = None
    num_iterations: int = 1

    alpha_sdpo: float = 0.0
    sdpo_jsd_beta: float = 0.5
    sdpo_temperature: float = 1.0
    sdpo_token_clip: float | None = None
    sdpo_teacher: str = "live"

    world_kinds: int = 6
    world_names: int = 32
    warm_start_steps: int = 450

    def __post_init__(self) -> None:
        self.validate()

    @property
    def learning_rate(self) -> float:
        return self.lr if self.lr is not None else (1e-3 if self.model in BUILT_IN_MODELS else 1e-6)

    @property
    def completion_length(self) -> int:
        if self.max_completion_length is not None:
            return self.max_completion_length
        return 24 if self.model == "toolworld" else 512

    @property
    def generation_steps(self) -> int:
        """Micro-batches that one generation serves before TRL generates anew."""
        stale = objective(self.objective).stale if self.num_iterations == 1 else 1
        spg = self.steps_per_generation or stale * self.gradient_accumulation_steps
        return spg * self.num_iterations

    @property
    def objective_overrides(self) -> dict[str, Any]:
        """What the run sets besides the objective's name."""
        return {knob: value for knob in OBJECTIVE_KNOBS if (value := getattr(self, knob)) is not None}

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
        """Refuse what contradicts itself, before anything is downloaded or rented."""
        self._check_names()
        self._check_numbers()
        if self.loop == "supervised":
            self._check_supervised()
        else:
            self._check_grpo()
            self._check_sdpo()

    def _check_names(self) -> None:
        _one_of("loop", self.loop, LOOPS)
        _one_of("dtype", self.dtype, DTYPES)
        objective(self.objective)
        _one_of("sdpo_teacher", self.sdpo_teacher, TEACHERS)

    def _check_numbers(self) -> None:
        positive = (
            "batch_size",
            "gradient_accumulation_steps",
            "context_length",
            "temperature",
            "num_iterations",
        )
        positive += (
            "sdpo_temperature",
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
            "alpha_sdpo",
            "weight_decay",
            "max_grad_norm",
            "lr_warmup_steps",
            "max_tool_calling_iterations",
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
        if self.alpha_sdpo > 0:
            raise InnerError(
                f'alpha_sdpo = {self.alpha_sdpo} needs rollouts, and loop = "supervised" has none. Set inner.loop = '
                '"grpo", or inner.alpha_sdpo = 0.'
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
        if self.batch_size % self.num_generations:
            raise InnerError(
                f"batch_size = {self.batch_size} is not a multiple of num_generations = {self.num_generations}, so a "
                f"group would be torn apart. Set inner.batch_size to {self.num_generations} or a multiple of it."
            )
        micro, ga = self.generation_steps, self.gradient_accumulation_steps
        if micro % ga and ga % micro:
            raise InnerError(
                f"steps_per_generation * num_iterations = {micro} and gradient_accumulation_steps = {ga} do not divide "
                "each other, so generations would end inside an inner step. Make one a multiple of the other."
            )
        po_settings(self.objective, self.objective_overrides)
        if self.model not in BUILT_IN_MODELS:
            self._check_own_task()

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
        if self.alpha_sdpo == 0:
            return
        has_tools = self.environment is not None or self.model == "toolworld"
        if not has_tools or self.max_tool_calling_iterations == 0:
            raise InnerError(
                f"alpha_sdpo = {self.alpha_sdpo} learns at tool errors, and this run can never report one (environment "
                f"= {self.environment}, max_tool_calling_iterations = {self.max_tool_calling_iterations}). Set "
                "inner.environment, or inner.alpha_sdpo = 0."
            )
        if self.alpha_sdpo >= 1 and self.sdpo_teacher == "live":
            raise InnerError(
                f"alpha_sdpo = {self.alpha_sdpo} with the live teacher collapses (measured: reward .94 to 0). Set "
                'inner.alpha_sdpo to .1 or less, or inner.sdpo_teacher = "frozen".'
            )
        if not 0 <= self.sdpo_jsd_beta <= 1:
            raise InnerError(
                f"sdpo_jsd_beta = {self.sdpo_jsd_beta} is outside [0, 1]. Set 0 (forward KL), 0.5 (JSD) or 1 (reverse "
                "KL)."
            )
        if self.sdpo_token_clip is not None and not self.sdpo_token_clip > 0:
            raise InnerError(
                f"sdpo_token_clip = {self.sdpo_token_clip} must be greater than 0; leave it out for no clip."
            )


class InnerLoop(Protocol):
    """What a driver may touch. `optimizer` is the raw torch optimizer: hooks belong there."""

    model: nn.Module
    optimizer: Optimizer
    boundary: int

    def train(self, stop: Callable[[], bool]) -> None:
        """Run inner steps until `stop()` is true."""
        ...

    def harvest(self) -> dict[str, float]:
        """Means since the last harvest; "samples" is a count since then."""
        ...


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise InnerError(f"{name} = {value!r} is not known. Set inner.{name} to one of: {', '.join(valid)}.")
