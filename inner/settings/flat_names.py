"""The name of a setting outside its table (as a keyword), and its place in a run.toml.

    alpha_sdpo = 0.1     a keyword of ComposerReplicationTrainer and compose_loss          (the channels' settings)
                         in [inner] of a run.toml: refused, "write weight in the table [inner.sdpo]"

Not promised: that every setting has such a name; newer settings have only their place in a table.
"""

from typing import Any

from inner.tasks.spec import is_task

FLAT_NAMES: dict[str, str] = {
    "schedule_steps": "schedule.weight_steps",
    "text": "data.text",
    "context_length": "data.context_length",
    "prompts": "data.prompts",
    "reward": "rewards.function",
    "reward_retries": "rewards.retries",
    "reward_timeout_s": "rewards.timeout_s",
    "environment": "sampling.environment",
    "num_generations": "sampling.num_generations",
    "max_completion_length": "sampling.max_completion_length",
    "max_tool_calling_iterations": "sampling.max_tool_calling_iterations",
    "temperature": "sampling.temperature",
    "policy_weight": "grpo.weight",
    "objective": "grpo.objective",
    "loss_type": "grpo.loss_type",
    "scale_rewards": "grpo.scale_rewards",
    "epsilon": "grpo.epsilon",
    "epsilon_high": "grpo.epsilon_high",
    "dynamic_sampling": "grpo.dynamic_sampling",
    "soft_overlong_tokens": "grpo.soft_overlong_tokens",
    "steps_per_generation": "grpo.steps_per_generation",
    "num_iterations": "grpo.num_iterations",
    "alpha_sdpo": "sdpo.weight",
    "alpha_sdpo_end": "sdpo.weight_end",
    "sdpo_context": "sdpo.context",
    "sdpo_teacher": "sdpo.teacher",
    "sdpo_ema_rate": "sdpo.ema_rate",
    "sdpo_wrapper": "sdpo.wrapper",
    "sdpo_jsd_beta": "sdpo.jsd_beta",
    "sdpo_temperature": "sdpo.temperature",
    "sdpo_token_clip": "sdpo.token_clip",
    "sdpo_top_k": "sdpo.top_k",
    "sdpo_success": "sdpo.success",
    "taid_t_start": "sdpo.taid_t_start",
    "taid_t_end": "sdpo.taid_t_end",
    "entropy_opd_h_max": "sdpo.entropy_opd_h_max",
    "eopd_threshold": "sdpo.eopd_threshold",
    "beta_replay": "replay.weight",
    "beta_replay_end": "replay.weight_end",
    "pairs": "replay.pairs",
    "dpo_variant": "replay.variant",
    "replay_batch_size": "replay.batch_size",
    "replay_skip_unfit": "replay.skip_unfit",
    "replay_dpo_beta": "replay.dpo_beta",
    "replay_label_smoothing": "replay.label_smoothing",
    "replay_nll_weight": "replay.nll_weight",
    "replay_dpop_lambda": "replay.dpop_lambda",
    "simpo_beta": "replay.simpo_beta",
    "simpo_gamma": "replay.simpo_gamma",
    "world_kinds": "toolworld.kinds",
    "world_names": "toolworld.names",
    "warm_start_steps": "toolworld.warm_start_steps",
}

# a removed setting -> its replacement, and a note on it; no keyword has the old name any more
GONE = {"lr_warmup_steps": "schedule.lr_warmup which counts outer steps"}
# the same for a key that became a table; dotted names
NOW_TABLES = {"inner.sampling.vllm": "[inner.vllm] which is the switch by itself"}

# the user's files: the kind, by which `files`, run.json and errors name a file ─▶ its setting
FILE_SETTINGS = {kind: FLAT_NAMES[kind] for kind in ("reward", "environment", "prompts", "pairs", "text")}
FILE_SETTINGS |= {"process": "process.function", "process_head": "process.head"}
MODULES = "modules"  # kind: a .zip of modules that the user's code imports (diloco/run/sibling_modules.py)
EVAL = "eval"  # kind: the held-out prompts of [eval], which is not in [inner]


def setting_of(kind: str, spelling: Any = None) -> str:
    """Return the setting as a user writes it: "reward" -> "inner.rewards.function", "reward.exact" -> its table.

    spelling: the setting's value; it tells whether rows come from a file or a task."""
    if kind in (EVAL, "prompts") and is_task(spelling):
        return "eval.task" if kind == EVAL else "inner.data.task"
    if kind == EVAL:
        return "eval.prompts"
    if kind == MODULES:
        return "the modules beside inner.rewards and inner.sampling.environment"
    return "inner.rewards.functions" if kind.startswith("reward.") else f"inner.{FILE_SETTINGS[kind]}"


def is_code(kind: str) -> bool:
    """Whether files of this kind are Python, spelled "file.py:name"."""
    return kind.partition(".")[0] in ("reward", "environment", "process")
