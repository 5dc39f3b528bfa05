"""[fleet], [log] and [eval] of a run.toml: the settings on which no weight depends.  This file does not import torch.

    [fleet] ──▶ control/000000.json     the operator's desired state; it may change later
    [log]   ──▶ the supervisor          trackers
    [eval]  ──▶ every replica           θ₀ ─ every ─▶ θ₅ ─ every ─▶ θ₁₀ …  θ_T, each with its share of held-out prompts

Not promised: that a tracker's package is installed (diloco/views/trackers/make.py); that `check_held_out` finds prompts
that differ only in a space.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from inner.errors import InnerError
from inner.settings.inner import InnerConfig
from inner.settings.tables import Table, setting
from inner.settings.task import check_sources, check_task
from inner.tasks.spec import TaskSpec
from rendezvous.agreement.rules import Timing
from rendezvous.layout import MOST_SLOTS

TRACKERS = ("wandb", "trackio", "tensorboard")
PROJECT = "diloco"
FOLDER = "tensorboard"
SAMPLES = 8  # completions per outer step, over all replicas


class ConfigError(ValueError):
    """The error for a configuration that cannot be run."""


class OuterError(RuntimeError):
    """The error for a model or settings that do not fit the outer loop."""


class OuterConfigError(ConfigError, OuterError):
    """The error for an invalid setting of the outer step: a ConfigError in a run.toml, an OuterError in make_diloco."""


@dataclass(frozen=True)
class FleetConfig(Table):
    """The fleet that the run starts with. You can change each setting later, because none is a training setting."""

    path: ClassVar[str] = "fleet"
    error: ClassVar[type[Exception]] = ConfigError

    replicas: int = setting(3, "Number of replicas that the supervisor keeps running.", least=1, most=MOST_SLOTS)
    steps: int = setting(10, "Outer steps in all.", least=1)
    min_replicas: int | None = setting(
        None, "Minimal number of fresh pseudogradients for an outer step (default: min(2, replicas)).", least=1
    )
    keep: int | str = setting(
        "20 GB",
        'Bytes of pseudogradients, means and snapshots that stay in the bucket: "20 GB", "500 MB", a number, "all", or '
        '"window": only blobs that the last two snapshots need, which always stay (default with [inner.lora]: "all").',
    )
    broadcast_weights: bool = setting(False, "Write each step's weights in bf16 for rollout engines (docs/weights.md).")
    give_up_s: float = setting(600.0, "Seconds without progress after which a replica exits, resumable.", above=0)
    start_patience_s: float = setting(
        30.0, "Seconds that the first replicas wait for others before the first outer step is taken without them.",
        least=0,
    )  # fmt: skip
    hung_after_s: float = setting(
        600.0,
        "Seconds without an inner step after which a replica may count as hung and is started again; 0 for never. The "
        "limit grows to ten times its median step, to three times its longest step, and to twice the limit of a tool, "
        "an environment or an agent.",
        least=0,
    )
    log_rollouts: int = setting(
        4, "Number of rollouts that each replica logs per outer step, for `diloco watch` (0: none).", least=0, most=64
    )
    record_rollouts: bool = setting(
        True,
        "Keep all rollouts in the bucket, with all that tools answered: a replacement trains on those of its "
        "predecessor, and `diloco verify --inner` computes pseudogradients again. Not for images, nor for several "
        "devices without [inner.lora] (default with log_rollouts = 0: false).",
    )
    staleness: int | None = setting(None, "Age limit of actors' weights, in outer steps (~6 inner).", least=0, most=64)
    actor_engine: str = setting("", "Engine of a supervisor's actors, written as for `--engine`.")
    check_rollouts: float = setting(0.02, "Share of actors' bundles that replicas check.", least=0, most=1)

    def check(self) -> None:
        keep_bytes(self.keep)
        if not 1 <= self.quorum <= self.replicas:
            raise ConfigError(
                f"fleet.min_replicas = {self.quorum} with fleet.replicas = {self.replicas}: no outer step could ever "
                f"be taken. Use a number from 1 to {self.replicas}"
            )

    @property
    def quorum(self) -> int:
        return min(2, self.replicas) if self.min_replicas is None else self.min_replicas

    @property
    def timing(self) -> Timing:
        return Timing(give_up=self.give_up_s, start_patience=self.start_patience_s)


def keep_bytes(keep: int | str) -> int | None:
    """Parse "20 GB" -> 20_000_000_000; "all" -> None; "window" -> 0.   Raises ConfigError."""
    text = str(keep).strip()
    if text in ("all", "window"):
        return None if text == "all" else 0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(B|[kMGT]i?B|)", text)
    if found is None or isinstance(keep, bool):
        raise ConfigError(
            f'fleet.keep = {keep!r} is not known. Use a size such as "20 GB" or "500 MB", "all" or "window"'
        )
    unit = found[2]
    power = " kMGT".index(unit[0]) if unit not in ("", "B") else 0
    return int(float(found[1]) * (1024 if "i" in unit else 1000) ** power)


def with_keep(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables with `fleet.keep` in place of an earlier release's `fleet.retention` ("all", "window").

    The default for an adapter's run is "all", because such a run is small.  log_rollouts = 0 asks for no texts in the
    bucket, so record_rollouts is then false by default.
    """
    fleet = raw.get("fleet", {})
    inner = raw.get("inner", {})
    if not isinstance(fleet, Mapping):
        return dict(raw)
    rest = {k: v for k, v in fleet.items() if k != "retention"}
    default: dict[str, Any] = {"keep": "all"} if isinstance(inner, Mapping) and inner.get("lora") is not None else {}
    default |= {"record_rollouts": False} if fleet.get("log_rollouts") == 0 else {}
    return {**raw, "fleet": {**default, **({"keep": fleet["retention"]} if "retention" in fleet else {}), **rest}}


@dataclass(frozen=True)
class LogConfig(Table):
    """The trackers to which the supervisor writes the run's curves; fixed when the run is founded (docs/watch.md)."""

    path: ClassVar[str] = "log"
    error: ClassVar[type[Exception]] = ConfigError

    to: list = setting(list, "wandb, trackio, tensorboard: any of them, none by default.")
    project: str = setting("", "Project of wandb and trackio (default: WANDB_PROJECT, or diloco).")
    folder: str = setting(FOLDER, "Folder of TensorBoard's event files, on the machine where the supervisor runs.")
    samples: int = setting(
        SAMPLES, "Completions per outer step in a table, over all replicas; 0 for none.", least=0, most=64
    )

    def check(self) -> None:
        for name in self.to:
            if name not in TRACKERS:
                raise ConfigError(f"log.to has {name!r}, which is not a tracker. Use any of: {', '.join(TRACKERS)}")


class EvalError(InnerError):
    """The error for an [eval] that cannot be used."""


@dataclass(frozen=True)
class EvalConfig(Table):
    """The reward on prompts that training never sees, by outer step (docs/data.md)."""

    path: ClassVar[str] = "eval"
    error: ClassVar[type[Exception]] = EvalError

    prompts: str | list = setting(
        "", "Files or datasets with the same columns as the training prompts; set this or `task`."
    )
    task: str | None = setting(
        None, "Task that replaces `prompts`, like `inner.data.task`; rows of the training data are left out."
    )
    task_options: dict | None = setting(
        None, "The task's options (default: `inner.data.task_options`, if the task is the same)."
    )
    task_size: int = setting(200, "Rows of the task.", above=0, most=100_000)
    task_seed: int = setting(1, "Seed of the task's rows.", least=0, most=4000)
    every: int = setting(5, "Outer steps between two evaluations; θ₀ and the last step are evaluated too.", least=1)
    samples: int = setting(1, "Completions per prompt at the training temperature; 0 for none.", least=0, most=64)
    greedy: bool = setting(True, "Also one completion per prompt with the likeliest tokens.")

    def check(self) -> None:
        if not self.prompts and not self.task:
            raise EvalError(
                "[eval] has no prompts. Set eval.prompts to a .jsonl file that training does not read, or eval.task."
            )
        check_sources("eval.prompts", self.prompts)
        check_task("eval", self.prompts, self.task)
        if self.task is None and (unread := [name for name in TASK_ONLY if getattr(self, name) != TASK_ONLY[name]]):
            raise EvalError(f"eval.{unread[0]} does nothing without eval.task. Set eval.task, or leave this out.")
        if not (self.samples or self.greedy):
            raise EvalError("eval.samples = 0 with eval.greedy = false measures nothing. Set one of them.")

    @property
    def source(self) -> str | list[str]:
        """The prompts' source in the config: files, datasets or a task."""
        return self.task or self.prompts

    def task_spec(self, inner: InnerConfig) -> TaskSpec:
        """Return the spec of the task's rows; call it only if `task` is set.   inner: the run's [inner], for the task's
        options."""
        same = inner.data.task_options if inner.data.task == self.task else {}
        options = same if self.task_options is None else self.task_options
        return TaskSpec(str(self.task), self.task_size, self.task_seed, options)

    def is_due(self, step: int, last: int) -> bool:
        """Whether to evaluate θ_step.   last: number of the run's outer steps, 0 if unknown."""
        return step % self.every == 0 or step == last


TASK_ONLY = {f.name: f.default for f in fields(EvalConfig) if f.name.startswith("task_")}
