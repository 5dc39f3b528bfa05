"""Maps names of settings outside their tables (keywords) to places in a run.toml, and guesses unknown keys' meaning.

    alpha_sdpo = 0.1     a keyword of ComposerReplicationTrainer and compose_loss          (the channels' settings)
                         in [inner] of a run.toml: refused, "write weight in the table [inner.sdpo]"

Not promised: that every setting has such a name; newer settings have only their place in a table.
"""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from inner.settings.trl import ALIASES, HANDED_THROUGH, instead_in_words

SLIP = 0.85  # minimal similarity of a mistyped key to a key elsewhere
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
# dotted name of a setting that became a table -> that table, and a note on it
NOW_TABLES = {"inner.sampling.vllm": "[inner.vllm] which turns vLLM on"}
MOVED = {f"inner.{flat}": f"inner.{dotted}" for flat, dotted in (FLAT_NAMES | GONE).items()} | NOW_TABLES


def unknown_text(name: str, known: Iterable[str]) -> str:
    """Return the error for a key that is not in `known`, dotted names: its new place, or the most similar key."""
    known = list(known)
    moved: Mapping[str, str] = {}
    if "inner.trl" in known:  # without it, `known` is a single table, which shares no names with [inner]
        known += [f"inner.trl.{each}" for each in HANDED_THROUGH]
        moved = MOVED
    if name in moved:
        place, _, remark = moved[name].partition(" ")
        table, _, key = place.rpartition(".")
        where = f"the table {place}" if place[0] == "[" else f"{key} in the table [{table}] (that is {place})"
        text = f"{name} has moved: write {where}"
        return f"{text}, {remark}" if remark else text
    prefix, _, key = name.rpartition(".")
    others = [n for n in known if n.rpartition(".")[2] == key]
    if key in ALIASES and len(others) != 1:
        return f"unknown setting {name}{instead_in_words(ALIASES[key])}"
    if guess := _nearest_name(prefix, key, known, moved):
        return f"unknown setting {name}; did you mean {guess}?"
    here = sorted(n.rpartition(".")[2] for n in known if n.rpartition(".")[0] == prefix)
    tables = {f"[{n.rpartition('.')[0]}]" for n in known if n.startswith(prefix and f"{prefix}.")}
    tables -= {f"[{prefix}]", "[]"}
    more = f"; tables: {', '.join(sorted(tables))}" if tables else ""
    return f"unknown setting {name}; known: {', '.join(here)}{more}"


def _nearest_name(prefix: str, key: str, known: list[str], moved: Mapping[str, str]) -> str:
    """Return a guess: the same key in another table, else the most similar key of this table, else a key of any table
    that differs by a typing error. Old names count, too. "" if there is none."""
    same = [n for n in known if n.rpartition(".")[2] == key]
    near_by = [n for n in same if n == f"inner.trl.{key}"]
    near_by = near_by or [n for n in same if n.partition(".")[0] == prefix.partition(".")[0]]
    if len(same) == 1 or len(near_by) == 1:
        return (near_by or same)[0]
    start = prefix and f"{prefix}."
    here = {k: start + k for n in known if n.startswith(start) and (k := n[len(start) :].partition(".")[0])}
    if near := get_close_matches(key, here, n=1):
        return here[near[0]]
    anywhere = {n.rpartition(".")[2]: n for n in known} | {
        old.rpartition(".")[2]: new.partition(" ")[0] for old, new in moved.items()
    }
    if near := get_close_matches(key, anywhere, n=1, cutoff=SLIP):
        return anywhere[near[0]]
    return same[0] if same else ""
