"""Defines the interface between the inner loop and the outer loop that drives it: InnerConfig, Seeds and InnerLoop.

    InnerConfig   plain data, read from and written to JSON; the defaults are the values that we recommend
    Seeds         data (the order), start (the first inner step), noise (sampling)
    InnerLoop     model · optimizer · train(stop) · pop_metrics() · sample(n) · follow(step, θ) · report_to(host)
                  one inner step = one optimizer step

        build_inner ──▶ loop.train(stop) ──▶ optimizer.step() · stop()? · optimizer.step() · stop()! ──▶ returns
                                             └ hooks on loop.optimizer may read and rewrite loop.model here

The loop calls `stop` after every inner step. `train` does not catch exceptions of hooks.

Not promised: that the loop calls `stop` only between generations. A driver that wants whole generations counts in
multiples of `boundary`.

No torch here: machines that never train also read and write configs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from inner.errors import FLOAT16, InnerError
from inner.settings.channels import ChannelSettings, ProcessSettings, ReplaySettings, SdpoSettings, refuse_unread
from inner.settings.objectives import POLICY_KNOBS, GrpoSettings, find_objective, po_settings
from inner.settings.tables import Table, list_settings, setting
from inner.settings.task import (
    FILE_SETTINGS,
    LR_REPLICAS,
    DataSettings,
    LoraSettings,
    RewardSettings,
    SamplingSettings,
    ScheduleSettings,
    ToolworldSettings,
    VllmSettings,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from inner.data.order import Share
    from inner.host import Host

LOOPS = ("grpo", "supervised")
BUILT_IN_MODELS = ("toolworld", "tiny")
OPTIMIZERS = ("adamw", "muon", "adamw8bit")
DTYPES = ("float32", "bfloat16")
AUTOCAST = ("auto", "bfloat16", "off")

# kind ("reward", "reward.NAME", "environment", "prompts", "pairs", "process", …) -> the user's file on this machine
Files = Mapping[str, Path]
Theta = Callable[[], Iterable[tuple[str, "Tensor"]]]  # yields the committed θ by parameter name
Progress = Callable[[], Mapping[str, int]] | None  # {"global_step", "max_steps"}: the run's inner steps, per replica


@dataclass(frozen=True)
class Seeds:
    """`data` fixes the order of the data, `start` the first inner step of this session, `noise` the sampling.

    Sessions of one slot share `data`. Each session starts at the inner step where the previous session stopped, with
    another `noise`.   share: the prompts and pairs that this replica reads; None: all, in the order of `data`."""

    data: int
    noise: int
    start: int = 0
    share: Share | None = None

    def __post_init__(self) -> None:
        for name in ("data", "noise", "start"):
            if getattr(self, name) < 0:
                raise InnerError(f"Seeds.{name} is {getattr(self, name)}; it must be 0 or more.")


@dataclass(frozen=True)
class InnerConfig(Table):
    """The model, the optimizer and the batches of one replica's loop.

    None: the recommended value for this model (see the properties).
    """

    path: ClassVar[str] = "inner"

    loop: str = setting("grpo", '"grpo": learn from rewards. "supervised": learn to continue a text.', one_of=LOOPS)
    model: str = setting(
        "toolworld",
        '"toolworld" or "tiny" (supervised), built in code; a local folder; a .gguf file; or a name on the Hub.',
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of a model on the Hub; the run keeps the commit of its start."
    )
    dtype: str = setting("float32", "Dtype of the trained weights.")
    autocast: str = setting(
        "auto",
        'Where matrix products of float32 weights use bfloat16: "auto": GPUs with bfloat16, "bfloat16": CPUs, too '
        '(faster with AMX), "off": nowhere. Weights, gradients and moments stay float32.',
        one_of=AUTOCAST,
    )
    lr: float | None = setting(
        None, "Learning rate of the inner optimizer (default: 1e-6, with [inner.lora] 1e-4, built-in models 1e-3).",
        above=0,
    )  # fmt: skip
    optimizer: str = setting(
        "adamw",
        '"muon": torch.optim.Muon for matrices, with AdamW\'s step size, and AdamW for embeddings, head, norms and '
        "biases. "
        '"adamw8bit": AdamW of bitsandbytes, with moments in 8 bits, on CUDA.',
        one_of=OPTIMIZERS,
    )
    weight_decay: float = setting(0.0, "Decoupled weight decay of the optimizer.", least=0)
    adam_beta1: float = setting(0.9, "AdamW's mean of gradients.", least=0, below=1)
    adam_beta2: float = setting(0.95, "AdamW's mean of squared gradients.", least=0, below=1)
    max_grad_norm: float = setting(1.0, "Gradients are clipped to this norm; 0 for no clip.", least=0)
    batch_size: int = setting(
        32, "Completions (grpo) or sequences (supervised) per forward and backward pass.", above=0
    )
    gradient_accumulation_steps: int = setting(1, "Forward and backward passes per inner step.", above=0)
    gradient_checkpointing: bool = setting(False, "Compute activations again in the backward pass: less memory.")

    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    lora: LoraSettings | None = None
    data: DataSettings = field(default_factory=DataSettings)
    rewards: RewardSettings = field(default_factory=RewardSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    grpo: GrpoSettings = field(default_factory=GrpoSettings)
    sdpo: SdpoSettings = field(default_factory=SdpoSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    process: ProcessSettings | None = None
    vllm: VllmSettings | None = None
    toolworld: ToolworldSettings = field(default_factory=ToolworldSettings)
    trl: dict = setting(
        dict, "`[inner.trl]`: other settings of TRL's GRPOConfig, by their names there (listed at the end)."
    )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as plain data. Include the engine's dtype even if it equals the weights' dtype."""
        values = super().to_dict()
        if self.vllm is not None:
            values["vllm"]["dtype"] = self.engine_dtype
        return values

    @property
    def engine_dtype(self) -> str | None:
        """The dtype in which vLLM computes; None without vLLM."""
        return None if self.vllm is None else self.vllm.dtype or self.dtype

    @property
    def channels(self) -> ChannelSettings:
        """The settings of the three channels.   Raises ChannelError."""
        return ChannelSettings(self.grpo.weight, self.sdpo, self.replay, self.schedule.weight_steps)

    @property
    def learning_rate(self) -> float:
        if self.lr is not None:
            return self.lr
        if self.model in BUILT_IN_MODELS:
            return 1e-3
        return 1e-6 if self.lora is None else 1e-4

    @property
    def completion_length(self) -> int:
        if self.sampling.max_completion_length is not None:
            return self.sampling.max_completion_length
        return 24 if self.model == "toolworld" else 512

    @property
    def generation_steps(self) -> int:
        """Return the number of micro-batches that train on one generation before TRL generates again."""
        stale = find_objective(self.grpo.objective).stale if self.grpo.num_iterations == 1 else 1
        return self.grpo.num_iterations * (self.grpo.steps_per_generation or stale * self.gradient_accumulation_steps)

    @property
    def generation_size(self) -> int:
        """Return the number of completions of one generation: whole groups of num_generations, scored together."""
        return self.batch_size * (self.generation_steps // self.grpo.num_iterations)

    @property
    def objective_settings(self) -> dict[str, Any]:
        """The objective's settings, with this run's overrides.   Raises ObjectiveError."""
        length = {"max_completion_length": self.completion_length}
        return po_settings(self.grpo.objective, {**self.trl, **self.grpo.overrides, **length})

    @property
    def compares_with_start(self) -> bool:
        """Whether the loss needs θ₀ during the whole run: DPO's reference, KL term, frozen teacher, process head."""
        if self.loop != "supervised" and self.objective_settings.get("beta"):
            return True
        if self.process is not None and self.process.head is not None:
            return True
        reference = self.replay.is_used and self.replay.variant == "dpo"
        return reference or (self.sdpo.is_used and self.sdpo.teacher == "frozen")

    @property
    def boundary(self) -> int:
        """Return the number of inner steps between two generations."""
        if self.loop == "supervised":
            return 1
        return max(1, self.generation_steps // self.gradient_accumulation_steps)

    @property
    def named_files(self) -> dict[str, Any]:
        """Kind -> the user's file as the config names it: "reward" or "reward.NAME", "environment", "prompts", …

        Values are str; the value of "prompts" may be a list of files, or a task."""
        parts = {kind: dotted.partition(".") for kind, dotted in FILE_SETTINGS.items()}
        named = {kind: getattr(getattr(self, table), key, None) for kind, (table, _, key) in parts.items()}
        named["prompts"] = self.data.source
        return {kind: name for kind, name in named.items() if name} | self.rewards.named

    @property
    def own_code(self) -> str:
        """The user's code for messages: the rewards; without rewards environment, agent or process reward."""
        process = self.process.function if self.process is not None else None
        sampling = self.sampling
        return ", ".join(self.rewards.lines.values()) or sampling.environment or sampling.agent or process or ""

    @property
    def scoring_task(self) -> str | None:
        """The task whose own scorer is the reward, if the config has a task, and no reward, boxes or agent."""
        return None if self.rewards.lines or self.sampling.boxes or self.sampling.agent else self.data.task

    def check(self) -> None:
        """Raise InnerError if settings contradict each other. This check runs before any download or rental."""
        if self.dtype == "float16":
            raise InnerError(FLOAT16.format('inner.dtype = "float16"'))
        if self.dtype not in DTYPES:
            raise InnerError(f"inner.dtype = {self.dtype!r} is not known. Use one of: {', '.join(DTYPES)}.")
        self.channels  # noqa: B018  (it raises if invalid)
        if self.trl:
            from inner.settings.trl import check_trl

            check_trl(self)
        self._check_pairs()
        if self.loop == "grpo":
            self._check_grpo()
        used = self.sdpo.is_used or self.process is not None or self.vllm is not None
        used = used or bool(self.lora and self.lora.dropout) or "disable_dropout" in self.trl
        used = used or self.sampling.agent is not None
        if self.loop == "supervised" or used or self.sampling.boxes or self.data.task or self.rewards.functions:
            from inner.settings.contradictions import check_options

            check_options(self)
        self._check_unread()

    def _check_unread(self) -> None:
        """Raise InnerError for settings that this run never reads. (ChannelSettings does it for the channels.)"""
        unread = partial(refuse_unread, self, error=InnerError)
        unread(ROLLOUTS_ONLY, is_read=self.loop != "supervised", condition='inner.loop = "grpo"')
        unread(("data.text",), is_read=self.loop == "supervised", condition='inner.loop = "supervised"')
        unread(WORLD_ONLY, is_read=self.model == "toolworld", condition='inner.model = "toolworld"')
        unread(("revision",), is_read=self.model not in BUILT_IN_MODELS, condition="inner.model is on the Hub")
        has_rows = "inner.data.prompts or inner.data.task is set"
        unread(("data.system",), is_read=bool(self.data.source), condition=has_rows)
        unread(TASK_ONLY, is_read=bool(self.data.task), condition="inner.data.task is set")
        sampling, boxes = self.sampling, "inner.sampling.boxes is set"
        has_tools = bool(sampling.environment or sampling.boxes) or self.model == "toolworld"
        unread(TOOLS_ONLY, is_read=has_tools, condition=f"inner.sampling.environment or {boxes}")
        unread(("sampling.agent_timeout_s",), is_read=bool(sampling.agent), condition="inner.sampling.agent is set")
        unread(("sampling.box_usd_per_hour",), is_read=bool(sampling.boxes), condition=boxes)
        unread(POLICY_ONLY, is_read=self.grpo.weight > 0, condition="inner.grpo.weight is above 0")

    def _check_grpo(self) -> None:
        if self.model == "tiny":
            raise InnerError(
                'inner.model = "tiny" has no chat template. Set inner.loop = "supervised" or another inner.model.'
            )
        self._check_groups()
        micro = self.generation_steps
        ga = self.gradient_accumulation_steps
        if micro % ga and ga % micro:
            raise InnerError(
                f"inner.grpo.steps_per_generation * inner.grpo.num_iterations = {micro} and "
                f"inner.gradient_accumulation_steps = {ga} do not divide each other, so generations would end inside "
                "an inner step. Make one a multiple of the other."
            )
        self.objective_settings  # noqa: B018  (it raises if invalid)
        if self.model not in BUILT_IN_MODELS:
            self._check_own_task()

    def _check_own_task(self) -> None:
        if self.data.source is None:
            raise InnerError(
                f'there are no prompts for inner.model = "{self.model}". Set inner.data.prompts to a file with a '
                "`prompt`, or inner.data.task."
            )
        sampling = self.sampling
        acts = sampling.environment or sampling.boxes or sampling.agent
        if not (self.rewards.lines or acts or self.scoring_task):
            raise InnerError(
                f'there is no reward for inner.model = "{self.model}". Set inner.rewards.function = '
                '"file.py:function", or inner.sampling.environment to a class with `get_reward`.'
            )

    def _check_groups(self) -> None:
        """Raise InnerError unless a generation holds whole groups: TRL scores a whole generation at once."""
        group = self.sampling.num_generations
        if self.generation_size % group == 0:
            return
        per_generation = self.generation_steps // self.grpo.num_iterations
        fitting = group // gcd(self.batch_size, group)
        raise InnerError(
            f"one generation makes inner.batch_size = {self.batch_size} · steps_per_generation = {per_generation} "
            "completions (without a setting of its own, steps_per_generation is gradient_accumulation_steps), which "
            f"is not a multiple of num_generations = {group}, so a group would be torn apart. Set inner.batch_size to "
            f"{group} or a multiple of it, or inner.grpo.steps_per_generation to {fitting} or a multiple of it."
        )

    def _check_pairs(self) -> None:
        if self.replay.is_used and self.replay.pairs is None:
            raise InnerError(
                f"inner.replay.weight = {self.replay.weight} has no pairs to learn from. Set inner.replay.pairs to the "
                ".jsonl that `save_pairs` wrote, or inner.replay.weight = 0."
            )
        if self.replay.pairs is not None and not self.replay.is_used:
            raise InnerError(
                f"inner.replay.pairs = {self.replay.pairs!r} with inner.replay.weight = 0 would teach nothing. Set "
                "inner.replay.weight, or leave inner.replay.pairs out."
            )


def _keys_of(table: type[Table]) -> tuple[str, ...]:
    return tuple(name.removeprefix("inner.") for name in list_settings(table, f"{table.path}."))


TASK_ONLY = tuple(f"data.{key}" for key in ("task_options", "task_size", "task_seed", "task_chat"))
TOOLS_ONLY = ("sampling.max_tool_calling_iterations", "sampling.tool_workers", "sampling.tool_timeout_s",
              "sampling.environment_timeout_s")  # fmt: skip
POLICY_ONLY = tuple(f"grpo.{knob}" for knob in POLICY_KNOBS)
ROLLOUTS_ONLY = (
    "gradient_checkpointing", "trl", "data.prompts", "data.task",
    *_keys_of(RewardSettings), *_keys_of(SamplingSettings),
    *(key for key in _keys_of(GrpoSettings) if key != "grpo.weight"),
)  # fmt: skip
WORLD_ONLY = _keys_of(ToolworldSettings)


def lr_factor(config: InnerConfig, step: int, replicas: int) -> float:
    """Return the learning rate's factor at outer step `step`, if the newest commit averages `replicas` replicas."""
    return config.schedule.lr_factor(step) * LR_REPLICAS[config.schedule.lr_replicas or "sqrt"](max(1, replicas))


class InnerLoop(Protocol):
    """The members of a loop that its driver may use. `optimizer` is the raw torch optimizer, for the driver's hooks."""

    model: nn.Module
    optimizer: Optimizer
    boundary: int

    def follow(self, step: Callable[[], int], theta: Theta, replicas: Callable[[], int], at: Progress = None) -> None:
        """Connect the loop to the run. `step` returns the committed outer step; `theta` yields that step's θ by
        parameter name; `replicas` returns how many replicas' pseudogradients that step averaged; `at`: progress.

        The loop calls these functions when it needs their values."""

    def start_at(self, inner_step: int) -> None:
        """Set the first inner step in the order of the data. Call it before `train`."""

    def report_to(self, host: Host) -> None:
        """Report failures of the user's own code to `host` (inner/host.py) from now on."""

    def train(self, stop: Callable[[], bool]) -> None:
        """Run inner steps until `stop()` returns True."""

    def pop_metrics(self) -> dict[str, float]:
        """Return means since the last pop_metrics; "samples" is a count."""
        ...

    def sample(self, n: int) -> dict[str, Any]:
        """Return at most n of the rollouts since the last call of `sample`, as plain data; {} if there are none."""
        ...
