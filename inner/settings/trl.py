"""Checks [inner.trl], the settings of TRL's GRPOConfig that have no other key in the run, without importing TRL.

    name ─▶ in TRL_FIELDS?  no: error with a similar name ─▶ does the run set it?  yes: error with the key to use
         ─▶ of the type that TRL declares, and in a range in which its loss is a number?     ─▶ GRPOConfig(**…)

Not promised: that TRL accepts every value of the type and range. TRL may refuse a string when the trainer is built.
No torch here.
"""

import json
import numbers
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from math import isfinite
from typing import TYPE_CHECKING, Any

from inner.errors import InnerError
from inner.settings.trl_fields import TRL_FIELDS, TRL_VERSION

if TYPE_CHECKING:
    from inner.settings.inner import InnerConfig

_SAME = ("weight_decay", "adam_beta1", "adam_beta2", "max_grad_norm", "gradient_accumulation_steps")
_SAMPLING = ("num_generations", "max_completion_length", "temperature", "max_tool_calling_iterations")
_GRPO = ("loss_type", "scale_rewards", "epsilon", "epsilon_high", "steps_per_generation", "num_iterations")
_INSTEAD = {
    "outer.sync_every and fleet.steps": ("max_steps", "num_train_epochs"),
    "inner.lr": ("learning_rate",),
    "inner.batch_size": ("per_device_train_batch_size", "auto_find_batch_size"),
    "inner.gradient_checkpointing": (
        "gradient_checkpointing", "gradient_checkpointing_kwargs", "activation_checkpointing",
        "activation_checkpointing_kwargs",
    ),
    "seed, at the top of the run.toml": ("seed", "data_seed", "full_determinism"),
    "inner.autocast": ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"),
    "[inner.schedule]": ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    "inner.optimizer": ("optim", "optim_args", "optim_target_modules"),
    "nothing: it is 1e-8, torch's default": ("adam_epsilon",),
    "inner.model and inner.revision": ("model_init_kwargs", "trust_remote_code"),
    "[inner.vllm]": (
        "use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
        "vllm_group_port", "vllm_tensor_parallel_size", "vllm_gpu_memory_utilization", "vllm_max_model_length",
        "vllm_enable_sleep_mode", "vllm_importance_sampling_correction", "vllm_importance_sampling_mode",
        "vllm_importance_sampling_clip_max", "vllm_importance_sampling_cap",
    ),
    "inner.grpo.steps_per_generation": ("generation_batch_size",),
    "inner.grpo.objective": ("importance_sampling_level",),
    "`diloco status`, `diloco report` and fleet.log_rollouts, which show what a run logs": (
        "logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter", "log_on_each_node",
        "log_level", "log_level_replica", "include_num_input_tokens_seen", "disable_tqdm", "trackio_space_id",
        "trackio_bucket_id", "trackio_static_space_id", "log_completions", "log_multimodal", "num_completions_to_print",
        "log_unique_prompts", "log_completions_hub_repo", "skip_memory_metrics", "debug",
    ),
    "[log], which names the run's trackers": ("report_to", "run_name", "project"),
    "outer.snapshot_every, and `diloco export`, which writes a model": (
        "output_dir", "save_only_model", "save_strategy", "save_steps", "save_on_each_node", "save_total_limit",
        "enable_jit_checkpoint", "push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy",
        "hub_always_push", "hub_revision", "load_best_model_at_end", "metric_for_best_model", "greater_is_better",
        "ignore_data_skip", "restore_callback_states_from_checkpoint", "resume_from_checkpoint",
    ),
    "[inner.data]; the run itself decides the data's order": (
        "shuffle_dataset", "train_sampling_strategy", "length_column_name", "remove_unused_columns", "label_names",
        "dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order",
    ),
    "[eval], which scores held-out prompts": (
        "do_eval", "eval_strategy", "eval_steps", "eval_delay", "per_device_eval_batch_size", "prediction_loss_only",
        "eval_on_start", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps",
        "include_for_metrics", "batch_eval_metrics", "num_generations_eval",
    ),
    "nothing: the run trains, and its trainer predicts nothing": ("do_train", "do_predict"),
    "nothing: the policy loss counts the tokens of all devices itself": ("average_tokens_across_devices",),
    "nothing: a reward has no labels to smooth; preference pairs have inner.replay.label_smoothing": (
        "label_smoothing_factor",
    ),
    "nothing: a place says how many devices a replica has": (
        "use_cpu", "local_rank", "accelerator_config", "parallelism_config", "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend", "ddp_timeout", "fsdp",
        "fsdp_config", "deepspeed", "ds3_gather_for_generation",
    ),
    "nothing: the reference of a run's KL term is θ₀": (
        "sync_ref_model", "ref_model_mixup_alpha", "ref_model_sync_steps",
    ),
}  # fmt: skip
# TRL's setting -> the key that sets it in a run
OWNED: dict[str, str] = {
    **{name: f"inner.{name}" for name in _SAME},
    **{name: f"inner.sampling.{name}" for name in _SAMPLING},
    **{name: f"inner.grpo.{name}" for name in _GRPO},
    **{name: instead for instead, names in _INSTEAD.items() for name in names},
}
_ELSEWHERE = {
    "inner.schedule.lr_warmup, in outer steps": ("warmup_ratio", "lr_warmup_ratio", "num_warmup_steps"),
    "outer.sync_every and fleet.steps": ("epochs", "num_epochs", "total_steps", "num_train_steps", "max_train_steps"),
    "outer.sync_every": ("inner_steps", "local_steps", "sync_steps"),
    "outer.lr": ("outer_lr", "outer_learning_rate"),
    "outer.momentum": ("outer_momentum",),
    "outer.snapshot_every": ("save_every", "save_freq", "checkpoint_every", "checkpointing_steps"),
    "fleet.replicas": ("num_replicas", "num_workers", "workers", "world_size", "num_gpus", "n_gpus", "gpus"),
    "inner.batch_size": ("train_batch_size", "micro_batch_size", "per_device_batch_size", "mini_batch_size"),
    "inner.model": (
        "model_name_or_path", "model_name", "model_id", "base_model", "pretrained_model_name_or_path", "model_path",
    ),
    "inner.dtype": ("torch_dtype", "precision", "mixed_precision"),
    "inner.lora.r": ("lora_r", "lora_rank", "rank"),
    "inner.lora.alpha": ("lora_alpha",),
    "inner.lora.dropout": ("lora_dropout",),
    "inner.lora.targets": ("target_modules", "lora_target_modules"),
    "the table [inner.lora]": ("peft_config", "use_peft", "peft", "lora_config", "use_lora"),
    "inner.rewards.function": ("reward_funcs", "reward_func", "reward_fn", "reward_function", "reward"),
    "inner.data.prompts": ("dataset", "dataset_name", "train_dataset", "train_file", "train_files", "data_files"),
    "eval.prompts": ("eval_dataset", "val_file", "val_files", "validation_file"),
    "inner.data.system": ("system_prompt", "system_message"),
    "inner.sampling.max_completion_length": (
        "max_new_tokens", "max_tokens", "max_response_length", "response_length", "max_completion_tokens",
    ),
    "inner.sampling.num_generations": ("group_size", "num_samples", "rollouts_per_prompt", "rollouts_per_example"),
    "inner.trl.beta": ("kl_coef", "kl_beta", "init_kl_coef"),
    "nothing: no prompt is cut; leave rows that are too long out of the file": ("max_prompt_length",),
    "nothing: weights are trained as they are; [inner.lora] needs little memory": ("load_in_4bit", "load_in_8bit"),
}  # fmt: skip
# name in older TRLs, PEFT and other trainers -> the key that sets it in a run
ALIASES: dict[str, str] = {name: instead for instead, names in _ELSEWHERE.items() for name in names} | OWNED
HANDED_THROUGH = tuple(name for name in TRL_FIELDS if name not in OWNED)
BATCHING = ("use_transformers_continuous_batching", "use_transformers_paged")  # TRL's two names
_POLICY_LOSS = (
    "beta", "delta", "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile", "off_policy_mask_threshold",
    "use_bias_correction_kl", "router_aux_loss_coef", "multi_objective_aggregation",
)  # fmt: skip
_OFF = {"top_entropy_quantile": 1.0}  # the value with which a setting does nothing; 0 for others
# setting -> its range in words, and whether a number is in it
_SHARE = ("must be greater than 0 and at most 1", lambda value: 0 < value <= 1)
_PART = ("must be at least 0 and at most 1", lambda value: 0 <= value <= 1)
_POSITIVE = ("must be greater than 0", lambda value: value > 0)
_RANGES: dict[str, tuple[str, Callable[[float], bool]]] = {
    "top_entropy_quantile": _PART, "sapo_temperature_pos": _POSITIVE, "sapo_temperature_neg": _POSITIVE,
    "top_p": _SHARE, "min_p": _PART, "repetition_penalty": _POSITIVE,
}  # fmt: skip
# key of generation_kwargs, in transformers' words or vLLM's -> the key that sets it in a run
_GENERATION = {
    "inner.sampling.temperature": ("temperature",),
    "inner.sampling.max_completion_length": ("max_new_tokens", "max_length", "max_tokens"),
    "inner.sampling.num_generations": ("num_return_sequences", "n"),
    "nothing: rollouts are always sampled, because the loss needs the log-probs of the sampled distribution": (
        "do_sample", "num_beams", "num_beam_groups", "penalty_alpha", "use_beam_search", "best_of",
    ),
    "nothing: TRL reads the tokens and log-probs in its own form": (
        "return_dict_in_generate", "output_scores", "output_logits", "logprobs", "prompt_logprobs", "detokenize",
    ),
    "nothing: special tokens are those of the tokenizer and of the model's generation_config.json": (
        "pad_token_id", "bos_token_id", "eos_token_id",
    ),
    "seed, at the top of the run.toml": ("seed",),
    **{f"inner.trl.{name}": (name,) for name in (
        "top_p", "top_k", "min_p", "repetition_penalty", "cache_implementation")},
}  # fmt: skip
GENERATION_OWNED = {name: instead for instead, names in _GENERATION.items() for name in names}
# setting -> another setting without which TRL never reads it
_PARTNERS = {"use_bias_correction_kl": "beta"} | dict.fromkeys(
    ("entropy_target", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"), "use_adaptive_entropy"
)
ENGINE_ONLY = tuple(name for name in HANDED_THROUGH if name.startswith("vllm_"))  # read only with [inner.vllm]


def check_trl(config: "InnerConfig") -> None:
    """Raise InnerError for a setting that TRL does not have, that the run owns, that has another type, or that
    contradicts the run's other settings."""
    _check_names(config.trl)
    _check_generation(config)
    _check_reward_weights(config)
    if config.loop == "supervised":
        return
    _check_batching(config)
    _check_policy_loss(config)
    _check_partners(config)
    _check_aggregation(config)
    if config.vllm is None and (unread := [name for name in ENGINE_ONLY if name in config.trl]):
        raise InnerError(
            f"inner.trl.{unread[0]} does nothing here: the run does not generate with vLLM. Add the table [inner.vllm]."
        )


def _check_names(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if name in ALIASES and name not in TRL_FIELDS:
            raise InnerError(f"unknown setting inner.trl.{name}{instead_in_words(ALIASES[name])}")
        if name not in TRL_FIELDS:
            near = get_close_matches(name, TRL_FIELDS, n=1)
            guess = f"did you mean {near[0]}? " if near else "correct the name, or leave it out. "
            if near and near[0] in OWNED:
                guess = f"you may mean {near[0]}{instead_in_words(OWNED[near[0]])}. "
            raise InnerError(
                f"unknown setting inner.trl.{name}; {guess}TRL {TRL_VERSION}'s GRPOConfig has none of that name"
            )
        if name in OWNED:
            raise InnerError(f"inner.trl.{name} = {value!r}: the run sets this itself{instead_in_words(OWNED[name])}.")
        if not _is_of_type(value, TRL_FIELDS[name].split(" | ")):
            raise InnerError(
                f"inner.trl.{name} = {value!r} must be {TRL_FIELDS[name].replace(' | ', ' or ')}, not "
                f"{type(value).__name__}"
            )
        if fault := _range_fault(name, value):
            raise InnerError(f"inner.trl.{name} = {value!r} {fault}. Set it so, or leave it out.")


def _range_fault(name: str, value: Any) -> str:
    """Return the range in words for a number outside the range, else ""."""
    if isinstance(value, float) and not isfinite(value):
        return "must be a finite number"
    words, holds = _RANGES.get(name, ("", lambda value: True))
    return "" if value is None or holds(value) else words


def _check_generation(config: "InnerConfig") -> None:
    """Refuse keys of generation_kwargs that another key of the run sets: they would win, unknown to the loss."""
    given = config.trl.get("generation_kwargs")
    given = (_as_table(given) if isinstance(given, str) else given) or {}
    own = _own_generation(config)
    for name in given:
        if name in GENERATION_OWNED and (name not in own or given[name] != own[name]):
            raise InnerError(
                f"inner.trl.generation_kwargs has {name} = {given[name]!r}, which would replace the run's value, but "
                f"only in the rollouts{instead_in_words(GENERATION_OWNED[name])}."
            )
    if "max_time" in given:
        raise InnerError(
            f"inner.trl.generation_kwargs has max_time = {given['max_time']!r}, which cuts completions after so many "
            "seconds: how long they are would depend on the machine. Leave it out; "
            "inner.sampling.max_completion_length limits their tokens."
        )
    if "stop_strings" in given:
        raise InnerError(
            "inner.trl.generation_kwargs has stop_strings, for which `generate` needs the tokenizer, and TRL "
            f"{TRL_VERSION} does not pass it: every replica would end at its first rollout. Leave stop_strings out: a "
            "completion ends at the tokens that the model's generation_config.json calls eos_token_id, a list if "
            "there are several. With [inner.vllm], vLLM's own name is stop."
        )


def _own_generation(config: "InnerConfig") -> dict[str, Any]:
    """Return the values that the run passes itself. The same value in generation_kwargs changes nothing."""
    set_here = {name: config.trl[name] for name in GENERATION_OWNED if name in config.trl}
    of_generate = {"do_sample": True, "num_beams": 1} if config.vllm is None else {"n": 1}
    return {"temperature": config.sampling.temperature, **of_generate, **set_here}


def _as_table(text: str) -> dict[str, Any]:
    """Parse this JSON text as a table, as TRL does."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise InnerError(
            f"inner.trl.generation_kwargs = {text!r} is no JSON object. Write a table, "
            "`generation_kwargs = {no_repeat_ngram_size = 3}`."
        )
    return given


def _check_reward_weights(config: "InnerConfig") -> None:
    """Require one weight per reward function, as TRL does. An environment's get_reward has no weight."""
    weights = config.trl.get("reward_weights")
    if config.rewards.functions and weights is not None:
        raise InnerError(
            f"inner.trl.reward_weights = {weights} is set beside [inner.rewards.functions], "
            "which has the weights. Leave inner.trl.reward_weights out."
        )
    own = config.scoring_task is not None or config.model == "toolworld"
    functions = len(config.rewards.lines) or int(own)
    if isinstance(weights, list) and len(weights) != functions:
        raise InnerError(
            f"inner.trl.reward_weights = {weights} has {len(weights)} weights, and the run has {functions} reward "
            f"function{'s' * (functions != 1)}. Write one for each, or give each its weight in "
            "[inner.rewards.functions]."
        )
    numbers_only = all(isinstance(w, int | float) and not isinstance(w, bool) and isfinite(w) for w in weights or ())
    others = config.sampling.environment or config.sampling.boxes  # TRL gives their own reward the weight 1
    if weights is not None and not (numbers_only and (any(weights) or others)):
        raise InnerError(
            f"inner.trl.reward_weights = {weights} teaches nothing: weights must be finite numbers, and at least one "
            "must not be 0. Write 1.0 for each, for example."
        )


def _check_batching(config: "InnerConfig") -> None:
    """Refuse BATCHING: TRL 1.16 then casts the whole model to bfloat16 to generate, and never casts it back."""
    asked = [name for name in BATCHING if config.trl.get(name)]
    if asked and config.dtype == "float32" and config.autocast != "off":
        raise InnerError(
            f'inner.trl.{asked[0]} = true with inner.autocast = "{config.autocast}": where products are taken in '
            "bfloat16, TRL would cast the trained float32 weights to it for good. Set inner.autocast = "
            '"off", or leave it out (on a CPU it is the slower way to generate).'
        )


def _check_policy_loss(config: "InnerConfig") -> None:
    """Refuse settings of the policy loss if inner.grpo.weight = 0 leaves the policy loss out."""
    unread = [name for name in _POLICY_LOSS if config.trl.get(name) not in (None, _OFF.get(name, 0))]
    if unread and config.grpo.weight == 0:
        raise InnerError(
            f"inner.trl.{unread[0]} = {config.trl[unread[0]]!r} does nothing here: it is a part of the policy loss, "
            "which inner.grpo.weight = 0 leaves out. Leave it out, or set inner.grpo.weight above 0."
        )


def _check_partners(config: "InnerConfig") -> None:
    """Refuse settings of a part of the loss that another setting turns off."""
    for name, partner in _PARTNERS.items():
        asked = config.trl.get(name)
        if asked is not None and asked is not False and not config.trl.get(partner):
            raise InnerError(
                f"inner.trl.{name} = {asked!r} does nothing here: it is read only with inner.trl.{partner}. "
                f"Set inner.trl.{partner}, or leave {name} out."
            )


def _check_aggregation(config: "InnerConfig") -> None:
    """Refuse TRL's normalize_then_sum with another scale_rewards than "group", because TRL then ignores scale_rewards,
    and with a length penalty, because TRL then scales the penalty up to the size of a reward."""
    if config.trl.get("multi_objective_aggregation") != "normalize_then_sum":
        return
    scale = config.objective_settings["scale_rewards"]
    if scale != "group":
        raise InnerError(
            'inner.trl.multi_objective_aggregation = "normalize_then_sum" divides each reward by the standard '
            f'deviation of its group, and inner.grpo.objective = "{config.grpo.objective}" has scale_rewards = '
            f'"{scale}" here. Set inner.grpo.objective = "grpo", or leave the setting out.'
        )
    tokens = config.grpo.soft_overlong_tokens
    if tokens or (tokens is None and config.grpo.objective == "dapo"):
        number = tokens or "a fifth of max_completion_length, dapo's default,"
        raise InnerError(
            'inner.trl.multi_objective_aggregation = "normalize_then_sum" divides the penalty of '
            f"inner.grpo.soft_overlong_tokens = {number} by its own deviation in the group: one token too many would "
            "cost as much as a wrong answer. Set inner.grpo.soft_overlong_tokens = 0, or leave the setting out."
        )


def other_objective_text(
    name: str, fixed: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any], changed: list[str]
) -> str:
    """Return the error for TRL settings that change an objective into another.   fixed: objective -> its settings."""
    seen = {knob: settings.get(knob) for knob in fixed[name]}
    others = [key for key, theirs in fixed.items() if all(seen.get(k) == v for k, v in theirs.items())]
    others += [key for key in fixed if key in seen.values() and key not in others and key != name]
    means = ", ".join(f"{knob} = {fixed[name][knob]!r}" for knob in changed)
    got = ", ".join(f"{seen[knob]!r}" for knob in changed)
    instead = f"set objective = {others[0]!r}" if others else "leave it out, or build a GRPOConfig of your own"
    return (
        f"objective = {name!r} means {means}, got {got}: that is another objective. For that one {instead}. (loss "
        "types by objective: `diloco objectives`; scale_rewards: batch, group, none.)"
    )


def instead_in_words(instead: str) -> str:
    """Return the end of an error message: the key to use instead, or the reason to leave the setting out."""
    nothing, _, why = instead.partition("nothing: ")
    return f". Use {instead}" if nothing else f". Leave it out: {why}"


def _is_of_type(value: Any, options: list[str]) -> bool:
    """Whether the value has one of these types.  An int is accepted as a float; a bool is neither int nor float."""
    if isinstance(value, Mapping):
        return "dict" in options
    if type(value).__name__ in options:
        return True
    return "float" in options and isinstance(value, numbers.Integral) and not isinstance(value, bool)
