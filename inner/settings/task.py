"""Defines the tables of [inner] other than the loss's: data, sampling, vllm, rewards, schedule, lora; and user files.

    [inner.data] ──▶ prompts ──▶ [inner.sampling] ──▶ completions ──▶ [inner.rewards] ──▶ [inner.grpo]     loss
         └ text ──▶ next-token loss                    [inner.toolworld]: a built-in task
    [inner.schedule]    values that change with the committed outer step
    [inner.lora]        the run trains, synchronises and snapshots an adapter. The base model stays unchanged.
    [inner.vllm]        vLLM generates, in the replica's own process (vllm.py). If the table exists, vLLM is on.

Not promised: a full description of each setting here; docs/channels.md and `diloco objectives` say more.
No torch here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import cos, isfinite, pi, sqrt
from pathlib import Path
from typing import Any, ClassVar

from inner.errors import InnerError
from inner.settings.tables import Table, setting
from inner.tasks.spec import PROVIDERS, TaskSpec, check_spelling, is_task

_REWARD_MODEL = re.compile(r"hub:(?P<name>[\w.-]+/[\w.-]+)(@(?P<revision>[\w.-]+))?", re.ASCII)
LR_SHAPES = ("constant", "linear", "cosine")
ALL_LINEAR = "all-linear"
ENGINE_DTYPES = ("float32", "bfloat16")
OFF = "off"
IMPORTANCE_MODES = ("sequence_mask", "sequence_truncate", "token_mask", "token_truncate", OFF)
LR_REPLICAS: dict[str, Callable[[int], float]] = {"constant": lambda n: 1.0, "sqrt": sqrt, "linear": float}

# the user's files: kind (`files`, run.json and errors name a file by its kind) ─▶ its setting
FILE_SETTINGS = {
    "reward": "rewards.function", "environment": "sampling.environment", "agent": "sampling.agent",
    "prompts": "data.prompts", "pairs": "replay.pairs", "text": "data.text", "process": "process.function",
    "process_head": "process.head",
}  # fmt: skip
MODULES = "modules"  # kind: a .zip of modules that the user's code imports (diloco/run/sibling_modules.py)
EVAL = "eval"  # kind: the held-out prompts of [eval], which is not in [inner]


@dataclass(frozen=True)
class ScheduleSettings(Table):
    """Settings that change with the committed outer step, so that a late replica has the same values as the others."""

    path: ClassVar[str] = "inner.schedule"

    lr_shape: str = setting("constant", "How inner.lr falls to lr_end × inner.lr after the warm-up.", one_of=LR_SHAPES)
    lr_warmup: int = setting(0, "Outer steps over which inner.lr rises in equal parts.", least=0)
    lr_steps: int | None = setting(
        None, 'Outer steps until the end of "linear" and "cosine", warm-up included; then constant.', above=0
    )
    lr_replicas: str | None = setting(
        None,
        "inner.lr is the rate for one machine. With n replicas in an outer step, they multiply inner.lr by 1 "
        '("constant"), √n ("sqrt") or n ("linear"). Default: √n.',
        one_of=tuple(LR_REPLICAS),
    )
    lr_end: float = setting(0.0, 'Share of inner.lr after `lr_steps` of "linear" and "cosine".', least=0, most=1)
    weight_steps: int | None = setting(
        None, "Outer steps after which the channels' weights are `weight_end`, and TAID's t is `taid_t_end`.", above=0
    )

    def check(self) -> None:
        if self.lr_shape != "constant" and (self.lr_steps is None or self.lr_steps <= self.lr_warmup):
            raise InnerError(
                f'inner.schedule.lr_shape = "{self.lr_shape}" ends after inner.schedule.lr_steps = '
                f"{self.lr_steps} outer steps, which must be more than inner.schedule.lr_warmup = {self.lr_warmup}. "
                "Set it, for example, to the run's fleet.steps."
            )
        if self.lr_shape == "constant" and (self.lr_steps is not None or self.lr_end != 0):
            raise InnerError(
                f"inner.schedule.lr_steps = {self.lr_steps} and lr_end = {self.lr_end} do nothing with "
                'inner.schedule.lr_shape = "constant". Set "linear" or "cosine", or leave the other two out.'
            )

    def lr_factor(self, step: int) -> float:
        """Return the factor by which inner.lr is multiplied at committed outer step `step`."""
        rise = min(1.0, (step + 1) / (self.lr_warmup + 1))
        if self.lr_shape == "constant" or self.lr_steps is None:
            return rise
        done = min(1.0, max(0, step - self.lr_warmup) / (self.lr_steps - self.lr_warmup))
        fall = done if self.lr_shape == "linear" else (1 - cos(pi * done)) / 2
        return rise * (1 - (1 - self.lr_end) * fall)


@dataclass(frozen=True)
class DataSettings(Table):
    """The data that a run learns from."""

    path: ClassVar[str] = "inner.data"

    prompts: str | list | None = setting(
        None,
        "A .jsonl, .json, .csv or .parquet file, each row with a `prompt`; a dataset of the Hub, "
        '`"hub:openai/gsm8k/main:train"`; or a list of those. For `loop = "grpo"`.',
    )
    task: str | None = setting(
        None,
        "Task that replaces `prompts`: its package makes the rows and scores the replies, "
        '`"reasoning-gym:chain_sum"` or `"verifiers:TASKSET"`; or a folder of Harbor tasks, `"harbor:FOLDER"`.',
    )
    task_options: dict = setting(dict, "`[inner.data.task_options]`: the task's own options, by their names there.")
    task_size: int = setting(1000, "Number of the task's rows; at most all of them.", above=0, most=100_000)
    task_seed: int = setting(0, "Seed of the task's rows.", least=0, most=4000)
    task_chat: bool = setting(
        True, "The task's prompts are chats; false: one text each, for a model without a chat template."
    )
    columns: dict = setting(
        dict, 'Columns of files and datasets that get another name, also in `[eval]`: `{question = "prompt"}`.'
    )
    system: str | None = setting(None, "A system prompt, in front of every prompt.")
    text: str | None = setting(
        None, 'A .txt file, or .npy or .bin (uint16) of token ids; `loop = "supervised"` learns to continue it.'
    )
    context_length: int = setting(64, 'Tokens per sequence of `loop = "supervised"`.', above=0)

    def check(self) -> None:
        check_sources("inner.data.prompts", self.prompts)
        check_task("inner.data", self.prompts, self.task)
        if wrong := [name for name in self.columns.values() if not isinstance(name, str)]:
            raise InnerError(f'inner.data.columns: {wrong[0]!r} is not a name. Write {{question = "prompt"}}.')
        if self.text is not None and Path(self.text).suffix not in (".txt", ".npy", ".bin"):
            raise InnerError(
                f"inner.data.text = {self.text!r} does not end with .txt, .npy or .bin, so its form is unknown. "
                "Convert it, or rename it if it is plain text."
            )

    @property
    def source(self) -> str | list[str] | None:
        """The source of the prompts, as the config names it: files, datasets, or a task."""
        return self.task if self.prompts is None else self.prompts

    @property
    def task_spec(self) -> TaskSpec:
        """The task's spec. Read it only if `task` is set."""
        return TaskSpec(str(self.task), self.task_size, self.task_seed, self.task_options)


def is_one_file(prompts: str | list[str]) -> bool:
    """Whether `prompts` is a single local file: not several, not on the Hub, not a task."""
    return isinstance(prompts, str) and not prompts.startswith("hub:") and not is_task(prompts)


def check_task(table: str, prompts: str | list[str] | None, task: str | None) -> None:
    """Raise InnerError for a task that has no name, or that is set beside or in `prompts`.   table: "inner.data"."""
    if task is not None and prompts:
        raise InnerError(f"{table}.task = {task!r} is set beside {table}.prompts = {prompts!r}. Leave one of them out.")
    check_spelling(f"{table}.task", task)
    if is_task(prompts):
        raise InnerError(f'{table}.prompts = "{prompts}" is a task. Write {table}.task = "{prompts}".')


def check_sources(name: str, prompts: str | list[str] | None) -> None:
    """Raise InnerError for an empty list, or a list with other values than names."""
    if isinstance(prompts, list) and not (prompts and all(isinstance(one, str) and one for one in prompts)):
        raise InnerError(f'{name} = {prompts!r} must name files or datasets. Write ["a.jsonl", "b.parquet"].')


@dataclass(frozen=True)
class RewardSettings(Table):
    """The reward functions, and the treatment of their failures."""

    path: ClassVar[str] = "inner.rewards"

    function: str | None = setting(
        None, '"file.py:function", called as f(completions, **columns of the prompts) -> list[float | None].'
    )
    functions: dict = setting(
        dict,
        '`[inner.rewards.functions]`: several rewards, a line `"file.py:function" = weight` each, or '
        '`"hub:OWNER/NAME" = weight` for a reward model; the reward is their weighted sum (0: logged only).',
    )
    retries: int = setting(3, "Further tries of a call that failed, before its completions count as None.", least=0)
    timeout_s: float = setting(300.0, "Seconds of one call, for a whole batch; 0 for no limit.", least=0)
    broken: str | float = setting(
        "worst",
        'Reward of a completion that breaks the function while others get numbers: "worst" (lowest of the group), '
        'a number, or "none" (no advantage: a policy can learn to get that).',
    )

    def check(self) -> None:
        if self.broken not in ("worst", "none") and not (isinstance(self.broken, float) and isfinite(self.broken)):
            raise InnerError(
                f'inner.rewards.broken = {self.broken!r} is not known. Set it to "worst", "none" or a finite number.'
            )
        if self.function is not None or self.functions:
            from inner.settings.contradictions import check_rewards

            check_rewards(self.function, self.functions, reward_name)

    @property
    def lines(self) -> dict[str, str]:
        """Kind -> spelling, in the order in which rewards are called: {"reward.brief": "reward.py:brief", …}.

        The lines are sorted by the name of the function or model, so that every machine has the same order."""
        if self.function is not None:
            return {"reward": self.function}
        return {f"reward.{reward_name(s)}": s for s in sorted(self.functions, key=reward_name)}

    @property
    def named(self) -> dict[str, str]:
        """The lines that name a function in a file of the user."""
        return {kind: spelling for kind, spelling in self.lines.items() if not spelling.startswith("hub:")}

    @property
    def models(self) -> dict[str, str]:
        """The lines that name a model on the Hub."""
        return {kind: spelling for kind, spelling in self.lines.items() if spelling.startswith("hub:")}

    @property
    def weights(self) -> dict[str, float]:
        """Kind -> weight of each line of the table; {} for a single reward."""
        return {kind: float(self.functions[s]) for kind, s in self.lines.items() if self.functions}


def entry_point(spelling: str) -> str:
    """Return the part after the colon: "rewards.py:exact" -> "exact"; "" for a data file."""
    return spelling.rpartition(":")[2] if ":" in spelling else ""


def reward_name(spelling: str) -> str:
    """Return the reward's name in logs: "rewards.py:exact" -> "exact", "hub:me/judge-1b@v2" -> "judge-1b"."""
    return reward_model_parts(spelling)[0].rpartition("/")[2] if spelling.startswith("hub:") else entry_point(spelling)


def reward_model_parts(spelling: str) -> tuple[str, str]:
    """Split "hub:OWNER/NAME[@REVISION]" -> "OWNER/NAME" and the revision or "".   Raises InnerError."""
    found = _REWARD_MODEL.fullmatch(spelling)
    if found is None:
        raise InnerError(
            f"inner.rewards.functions: {spelling!r} is not a model's name. Write hub:OWNER/NAME, perhaps with "
            "@REVISION."
        )
    return found["name"], found["revision"] or ""


@dataclass(frozen=True)
class SamplingSettings(Table):
    """Sampling of the answers."""

    path: ClassVar[str] = "inner.sampling"

    num_generations: int = setting(8, "Completions per prompt: the group within which rewards are compared.")
    max_completion_length: int | None = setting(
        None, "Tokens of all turns together, tool results included (default: 512, ToolWorld 24).", above=0
    )
    temperature: float = setting(1.0, "Sampling temperature.", above=0)
    environment: str | None = setting(
        None, '"file.py:Class", TRL\'s environment: reset(**row); its public methods are the tools.'
    )
    agent: str | None = setting(
        None, '"file.py:function", called as f(row, model) -> reward; it calls the model as an OpenAI client does.'
    )
    agent_timeout_s: float = setting(
        600.0, "Seconds that an agent may take between two requests; after that, its rollout has no reward.", above=0
    )
    max_tool_calling_iterations: int = setting(2, "Turns in which tools may be called.", least=0)
    tool_workers: int = setting(1, "Rollouts whose tool calls, `reset` and `get_reward` run at the same time.", least=1)
    tool_timeout_s: float | None = setting(
        None, "Seconds that one tool call may take; after that, the call counts as a tool's error.", above=0
    )
    environment_timeout_s: float | None = setting(
        None, "Seconds that one `reset` or `get_reward` may take; after that, its rollout has no reward.", above=0
    )
    boxes: str | None = setting(
        None, "Where the episodes of Harbor tasks get their boxes (docs/reference/boxes.md).", one_of=PROVIDERS
    )
    box_usd_per_hour: float | None = setting(None, "Price of one box, for max_usd (default: the provider's).", least=0)

    def check(self) -> None:
        if self.num_generations < 2:
            raise InnerError(
                f"inner.sampling.num_generations = {self.num_generations}: a reward is compared within its group, so a "
                "group needs 2 or more completions. Set inner.sampling.num_generations to 8."
            )


@dataclass(frozen=True)
class ToolworldSettings(Table):
    """The built-in task: ask for the right one of many tools."""

    path: ClassVar[str] = "inner.toolworld"

    kinds: int = setting(6, "Kinds of task.", above=0)
    names: int = setting(32, "Tool names for each kind; one of them works.", above=0)
    warm_start_steps: int = setting(450, "Supervised steps that teach the start model the format.", above=0)


@dataclass(frozen=True)
class LoraSettings(Table):
    """Train an adapter, and leave the model as it is.

        W x  +  alpha / r · B A x      A: r × in, drawn at random      B: out × r, zero at first

    The average of B A is not the product of the averages of A and B (decision 036). With `freeze_a`, A keeps its random
    start values, and then both products are equal. Not promised: adapters other than LoRA."""

    path: ClassVar[str] = "inner.lora"

    r: int = setting(16, "Rank of the adapter.")
    alpha: float = setting(32.0, "The adapter's product is multiplied by alpha / r.", above=0)
    dropout: float = setting(0.0, "Dropout of the adapter's input in the loss; sampling has none.", least=0, below=1)
    targets: str | list = setting(
        ALL_LINEAR,
        "Every linear layer but the head and routers (experts that are one tensor have no adapter), or names of "
        'layers, such as ["q_proj", "v_proj"].',
    )
    base: str | None = setting(
        None, 'The frozen model in 4 bits: "nf4" (QLoRA; the extra `nf4`). Default: in inner.dtype.', one_of=("nf4",)
    )
    freeze_a: bool = setting(False, "Train only B: then the mean of the products is the product of the means.")

    def check(self) -> None:
        if self.r < 1:
            raise InnerError(
                f"inner.lora.r = {self.r}: an adapter of that rank has no parameters, so nothing would be trained. Set "
                "inner.lora.r to 16, or leave the table [inner.lora] out to train the whole model."
            )
        names = self.targets
        listed = isinstance(names, list) and names and all(isinstance(name, str) and name for name in names)
        if names != ALL_LINEAR and not listed:
            raise InnerError(
                f'inner.lora.targets = {names!r} is neither "{ALL_LINEAR}" nor a list of names. Set inner.lora.targets '
                'to ["q_proj", "v_proj"], for example.'
            )

    @property
    def names(self) -> list[str]:
        """The names of the adapted layers; [] means all linear layers."""
        return [] if isinstance(self.targets, str) else list(self.targets)


@dataclass(frozen=True)
class VllmSettings(Table):
    """Generate with vLLM, if the config has this table; it may be empty (vllm.md)."""

    path: ClassVar[str] = "inner.vllm"

    memory: float = setting(
        0.3, "Share of the GPU's memory for the engine: its weights, activations and KV cache.", above=0, below=1
    )
    max_model_length: int | None = setting(
        None,
        "Tokens of the longest prompt and its completion together (default: the model's own limit, for which the KV "
        "cache is often too small).",
        above=0,
    )
    sleep: bool = setting(
        False, "Free the engine's memory while the optimizer works; each generation loads the weights again."
    )
    dtype: str | None = setting(
        None,
        "The dtype that the engine computes in (default: inner.dtype). bfloat16 under a float32 trainer is faster, and "
        "samples from a slightly different policy.",
        one_of=ENGINE_DTYPES,
    )
    importance_mode: str = setting(
        "sequence_mask",
        'Weight π_trainer / π_engine of each sequence or token: above the clip, 0 ("mask") or the clip ("truncate"); '
        '"off": no weights, which saves a forward, for an engine in the trainer\'s dtype.',
        one_of=IMPORTANCE_MODES,
    )
    importance_clip: float = setting(3.0, "The largest ratio that is used unchanged.", above=0)

    @property
    def corrects(self) -> bool:
        return self.importance_mode != OFF


def setting_of(kind: str, spelling: Any = None) -> str:
    """Return the setting as a user writes it: "reward" -> "inner.rewards.function", "reward.exact" -> its table.

    spelling: the setting's value, which names a file or a task."""
    if kind in (EVAL, "prompts") and is_task(spelling):
        return "eval.task" if kind == EVAL else "inner.data.task"
    if kind == EVAL:
        return "eval.prompts"
    if kind == MODULES:
        return "the modules beside inner.rewards and inner.sampling.environment"
    return "inner.rewards.functions" if kind.startswith("reward.") else f"inner.{FILE_SETTINGS[kind]}"


def is_code(kind: str) -> bool:
    """Whether files of this kind are Python, spelled "file.py:name"."""
    return kind.partition(".")[0] in ("reward", "environment", "agent", "process")
