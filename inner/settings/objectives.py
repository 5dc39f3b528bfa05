"""[inner.grpo], and the menu of policy-gradient objectives. Each is a preset of TRL's settings.

    r = π / π_old per token    s = exp(mean_t log r) per sequence    A = (R - mean of the group) / scale

    make_po_config("gspo", learning_rate=1e-6)                inner/settings/poconfig.py
        │ fixed      loss_type, importance_sampling_level, …    they define GSPO: another value raises an error
        │ values     epsilon = 3e-4, …                          the paper's values; you can change them
        │ stale      4 steps per generation                     without it r = 1, and GSPO is GRPO
        └▶ POConfig  a GRPOConfig with all these values; an error if TRL's config holds other values

In an on-policy run (num_iterations = 1, and each generation serves at most one inner step), r = 1 everywhere. Then
clip ranges, caps and the sequence ratio do nothing. A warning names these knobs if the objective needs them.

Not promised: the papers' results, batch sizes or lengths. TRL's own GRPOTrainer does not know gmpo (it stops at the
first loss) and ignores `dynamic_sampling` and `soft_overlong_tokens`: only ComposerReplicationTrainer implements these.

No torch here: machines that never train also read the menu.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, ClassVar

from inner.errors import InnerError
from inner.settings.tables import Table, setting

SCALE_REWARDS = ("batch", "group", "none")
NEVER_CLIPS = 0.05  # an epsilon that never clips s, because s is a mean over tokens and changes by thousandths
RATIO_KNOBS = ("epsilon", "epsilon_high", "delta")  # knobs that only affect π / π_old


class ObjectiveError(InnerError, ValueError):
    """The settings do not match the objective's name."""


@dataclass(frozen=True)
class Objective:
    """One objective.   ratio: knobs of its ratio, without effect if π = π_old.   ignores: knobs that it never reads.
    stale: steps_per_generation / gradient_accumulation_steps.   on_policy: what the objective becomes if π = π_old."""

    title: str
    paper: str
    formula: str
    when: str
    fixed: Mapping[str, Any]
    values: Mapping[str, Any] = field(default_factory=dict)
    ratio: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()
    stale: int = 1
    on_policy: str = "itself"


def _fixed_settings(loss_type: str, level: str = "token", **more: Any) -> dict[str, Any]:
    return {"loss_type": loss_type, "importance_sampling_level": level, **more}


_CLIP = "min(r A, clip(r, 1-ε, 1+ε_high) A)"
_GMPO_IGNORES = (
    "delta", "entropy_coef", "use_adaptive_entropy", "off_policy_mask_threshold", "router_aux_loss_coef",
    "use_bias_correction_kl",
)  # fmt: skip

PO_OBJECTIVES: dict[str, Objective] = {
    "grpo": Objective(
        title="Group Relative Policy Optimization",
        paper="arXiv 2402.03300",
        formula=f"-mean_i mean_t {_CLIP}, A / std of the group",
        when="the baseline of most papers; favours short right answers and long wrong ones",
        fixed=_fixed_settings("grpo", scale_rewards="group"),
        values={"epsilon": 0.2, "beta": 0.0},
    ),
    "dr_grpo": Objective(
        title="Dr. GRPO, GRPO done right",
        paper="arXiv 2503.20783",
        formula=f"-Σ_i Σ_t {_CLIP} / (B · max_completion_length), A not scaled",
        when="the default: no bias from length or from the group's spread; the loss shrinks as "
        "max_completion_length grows",
        fixed=_fixed_settings("dr_grpo", scale_rewards="none"),
        values={"epsilon": 0.2, "beta": 0.0, "num_iterations": 1},
    ),
    "bnpo": Objective(
        title="token mean over the micro-batch, A scaled by the batch",
        paper="TRL's loss of that name",
        formula=f"-Σ_i Σ_t {_CLIP} / tokens of the micro-batch, A / std of the batch",
        when="sparse rewards and a large micro-batch; the result depends on the micro-batch's size",
        fixed=_fixed_settings("bnpo", scale_rewards="batch"),
        values={"epsilon": 0.2, "beta": 0.0},
    ),
    "dapo": Objective(
        title="Decoupled clip and dynamic sampling",
        paper="arXiv 2503.14476",
        formula=f"-Σ_i Σ_t {_CLIP} / tokens of the inner step; only groups with different rewards; "
        "R - how far y reaches into the last tokens",
        when="long answers and falling entropy; costs further generations where groups agree",
        fixed=_fixed_settings("dapo", scale_rewards="group"),
        values={
            "epsilon": 0.2,
            "epsilon_high": 0.28,
            "beta": 0.0,
            "mask_truncated_completions": True,
            "dynamic_sampling": 10,
        },
        ratio=("epsilon", "epsilon_high"),
        on_policy="its token mean and its dynamic sampling, without the clip-higher",
    ),
    "gspo": Objective(
        title="Group Sequence Policy Optimization",
        paper="arXiv 2507.18071",
        formula="-mean_i min(s A, clip(s, 1-ε, 1+ε_high) A)",
        when="mixtures of experts and long answers, where single tokens' ratios are noise",
        fixed=_fixed_settings("grpo", "sequence"),
        values={"epsilon": 3e-4, "epsilon_high": 4e-4, "beta": 0.0},
        ratio=("importance_sampling_level", "epsilon", "epsilon_high"),
        stale=4,
        on_policy="grpo",
    ),
    "cispo": Objective(
        title="Clipped IS-weight Policy Optimization",
        paper="arXiv 2506.13585",
        formula="-Σ_i Σ_t sg(min(r, ε_high)) A log π / tokens of the inner step",
        when="rare but decisive tokens: a capped weight, and every token keeps its gradient",
        fixed=_fixed_settings("cispo"),
        values={"epsilon_high": 5.0, "beta": 0.0},
        ratio=("epsilon_high",),
        ignores=("epsilon", "delta"),
        on_policy="dapo's token mean",
    ),
    "luspo": Objective(
        title="Length-Unbiased Sequence Policy Optimization",
        paper="arXiv 2602.05261",
        formula="-mean_i |y_i| min(s A, clip(s, 1-ε, 1+ε_high) A)",
        when="gspo, where answers shrink: each sequence counts by its length",
        fixed=_fixed_settings("luspo", "sequence"),
        values={"epsilon": 2e-3, "epsilon_high": 2.5e-3, "beta": 0.0},
        ratio=("importance_sampling_level", "epsilon", "epsilon_high"),
        stale=4,
        on_policy="dr_grpo's direction, at another scale",
    ),
    "sapo": Objective(
        title="Soft Adaptive Policy Optimization",
        paper="arXiv 2511.20347",
        formula="-mean_i mean_t (4/τ) σ(τ (r - 1)) A, τ by the sign of A",
        when="a clip that fades instead of cutting",
        fixed=_fixed_settings("sapo"),
        values={"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "beta": 0.0},
        ratio=("sapo_temperature_pos", "sapo_temperature_neg"),
        ignores=("epsilon", "epsilon_high", "delta"),
        on_policy="grpo",
    ),
    "vespo": Objective(
        title="Variational Sequence-level Soft Policy Optimization",
        paper="arXiv 2602.10693",
        formula="-Σ_i Σ_t sg(w^k exp(λ (1 - w))) A log π / tokens of the inner step, w = Π_t r; k, λ by A's sign",
        when="very stale data: a smooth weight per sequence",
        fixed=_fixed_settings("vespo"),
        values={"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0, "beta": 0.0},
        ratio=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        ignores=("epsilon", "epsilon_high", "delta"),
        on_policy="dapo's token mean",
    ),
    "gmpo": Objective(
        title="Geometric-Mean Policy Optimization",
        paper="arXiv 2507.20673",
        formula="-mean_i exp(mean_t clip(log r, -ε, ε_high, on the side that A pushes to)) A",
        when="outlier tokens: they hardly change the geometric mean; ε is in log space",
        fixed=_fixed_settings("gmpo"),
        values={"epsilon": 0.4, "epsilon_high": 0.4, "beta": 0.0},
        ratio=("epsilon", "epsilon_high"),
        ignores=_GMPO_IGNORES,
        on_policy="grpo",
    ),
    "lite_ppo": Objective(
        title="Lite PPO",
        paper="arXiv 2508.08221",
        formula=f"-Σ_i Σ_t {_CLIP} / tokens of the inner step, A / std of the batch",
        when="small models and plain rewards: of the many tricks that the paper tried, the two that helped",
        fixed=_fixed_settings("dapo", scale_rewards="batch"),
        values={"epsilon": 0.2, "beta": 0.0},
    ),
}


# From a name and overrides to settings


def find_objective(name: str) -> Objective:
    if name not in PO_OBJECTIVES:
        near = get_close_matches(name, PO_OBJECTIVES, n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        lines = "\n".join(f"  {key:9s} {each.when}" for key, each in PO_OBJECTIVES.items())
        raise ObjectiveError(f"objective = {name!r} is not known.{guess} The menu:\n{lines}")
    return PO_OBJECTIVES[name]


def po_settings(name: str, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the preset's settings with the overrides, checked. An override of None keeps the preset's value."""
    preset = find_objective(name)
    given = {k: v for k, v in overrides.items() if v is not None}
    if "scale_rewards" in given:  # TRL takes booleans, too
        given["scale_rewards"] = {True: "group", False: "none"}.get(given["scale_rewards"], given["scale_rewards"])
    for knob in given:
        owner = knob.split("_")[0]
        if knob in preset.ignores or (owner in ("sapo", "vespo") and owner != name):
            raise ObjectiveError(f"objective = {name!r} does not read {knob}, so it does nothing. Leave {knob} out.")
    settings = {"scale_rewards": "group", **preset.values, **preset.fixed, **given}
    if name == "dapo" and (length := settings.get("max_completion_length")):
        settings.setdefault("soft_overlong_tokens", length // 5)  # the paper's 4096 of 20480
    if preset.stale > 1 and not ({"steps_per_generation", "generation_batch_size", "num_iterations"} & set(given)):
        settings["steps_per_generation"] = preset.stale * given.get("gradient_accumulation_steps", 1)
    check_settings(name, settings)
    return settings


def check_settings(name: str, settings: Mapping[str, Any]) -> None:
    """Raise ObjectiveError if `settings` do not match the objective `name`."""
    preset = find_objective(name)
    scale = settings.get("scale_rewards")
    if scale not in SCALE_REWARDS:
        raise ObjectiveError(f"scale_rewards = {scale!r} is not known. One of: {', '.join(SCALE_REWARDS)}.")
    changed = [knob for knob, value in preset.fixed.items() if settings.get(knob) != value]
    if changed:
        from inner.settings.trl import other_objective_text

        fixed = {key: each.fixed for key, each in PO_OBJECTIVES.items()}
        raise ObjectiveError(other_objective_text(name, fixed, settings, changed))
    low = settings.get("epsilon")
    high = settings.get("epsilon_high")
    if name == "dapo" and not (low is not None and high is not None and high > low):
        raise ObjectiveError(
            f"objective = 'dapo' needs a larger range upwards than downwards, but epsilon_high = {high} is not above "
            f"epsilon = {low}. Set epsilon_high = 0.28; 'bnpo' and 'lite_ppo' have a token mean with equal ranges."
        )
    if name == "cispo" and not (high is not None and high >= 1):
        raise ObjectiveError(
            f"objective = 'cispo' caps every weight at epsilon_high = {high}, and an on-policy weight is 1: below 1 it "
            "scales the whole gradient down. Set epsilon_high = 5.0."
        )
    for knob in ("beta", "dynamic_sampling", "soft_overlong_tokens", "off_policy_mask_threshold"):
        if not (settings.get(knob) or 0) >= 0:
            raise ObjectiveError(f"{knob} = {settings[knob]} must be 0 (off) or more. Set {knob}.")
    for knob in RATIO_KNOBS:
        if settings.get(knob) is not None and not settings[knob] > 0:
            raise ObjectiveError(f"{knob} = {settings[knob]} must be greater than 0. Set {knob}.")
    tokens, length = settings.get("soft_overlong_tokens") or 0, settings.get("max_completion_length") or 0
    if "max_completion_length" in settings and tokens > length:
        raise ObjectiveError(
            f"soft_overlong_tokens = {tokens} is more than max_completion_length = {length}: every answer would be "
            "punished. Set it to a fifth of that, or to 0."
        )
    if (delta := settings.get("delta")) is not None and not delta > 1:
        raise ObjectiveError(
            f"delta = {delta} caps the ratio r, which is 1 on-policy: delta <= 1 stops the gradient of right answers. "
            "Set delta = 4.0, for example (TRL recommends more than 1 + epsilon), or leave it out."
        )


# Which knobs do nothing


def exactly_on_policy(settings: Mapping[str, Any]) -> bool:
    """Whether π = π_old in every loss: one inner step uses up each generation."""
    accumulated = settings.get("gradient_accumulation_steps") or 1
    served = (settings.get("steps_per_generation") or accumulated) * (settings.get("num_iterations") or 1)
    return accumulated % served == 0


def inert_knobs(name: str, settings: Mapping[str, Any], asked: Mapping[str, Any] | None = None) -> tuple[str, ...]:
    """Return the knobs, of the objective and of the user, that have no effect in a run with these settings."""
    if not exactly_on_policy(settings):
        return ()
    counted = [*find_objective(name).ratio, *(knob for knob in RATIO_KNOBS if (asked or {}).get(knob) is not None)]
    return tuple(dict.fromkeys(counted))


# The table


@dataclass(frozen=True)
class GrpoSettings(Table):
    """The policy gradient: an objective of the menu, and the run's changes to it."""

    path: ClassVar[str] = "inner.grpo"

    objective: str = setting(
        "dr_grpo", "A name of the menu (`diloco objectives`); it sets each setting below that you leave out."
    )
    weight: float = setting(
        1.0, "Weight of the policy loss beside distillation and replay; 0: no policy loss, as in SDPO.", least=0
    )
    loss_type: str | None = setting(None, "TRL's loss_type, which the objective fixes; another value is refused.")
    scale_rewards: str | None = setting(None, '"group", "batch" or "none": the divisor of advantages.')
    epsilon: float | None = setting(None, "Clip range of the ratio, downwards.")
    epsilon_high: float | None = setting(None, "Clip range of the ratio, upwards.")
    dynamic_sampling: int | None = setting(
        None, "Limit of further generations per batch, to replace groups whose rewards are all equal."
    )
    soft_overlong_tokens: int | None = setting(
        None, "Length penalty: the last tokens before max_completion_length cost up to 1 of reward."
    )
    steps_per_generation: int | None = setting(
        None, "Micro-batches that one generation serves (default: those of one inner step).", above=0
    )
    num_iterations: int = setting(1, "Number of updates from each generation.", above=0)

    def check(self) -> None:
        find_objective(self.objective)

    @property
    def overrides(self) -> dict[str, Any]:
        """The settings of the objective that this run overrides."""
        return {knob: value for knob in OBJECTIVE_KNOBS if (value := getattr(self, knob)) is not None}


POLICY_KNOBS = ("loss_type", "scale_rewards", "epsilon", "epsilon_high")
OBJECTIVE_KNOBS = (*POLICY_KNOBS, "dynamic_sampling", "soft_overlong_tokens")
