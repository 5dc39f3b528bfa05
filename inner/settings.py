"""The weights and the knobs of the loss's three channels, and how they move.

    total(t) = policy_weight · policy  +  α(t) · sdpo  +  β(t) · replay            t: the committed outer step

    α(t)   alpha_sdpo  ──▶ alpha_sdpo_end      ╲  straight lines over the first `schedule_steps` committed steps,
    β(t)   beta_replay ──▶ beta_replay_end      ▏ then constant; without an end, constant from the start
    TAID   taid_t_start ──▶ taid_t_end         ╱

A function of t alone, so all replicas that stand at t optimise the same thing, and a new session goes on where the run
is.

Not promised: that a weight means the same under another kernel: the scale of the divergence jumps at sdpo_jsd_beta = 0
and 1, and DPO's gradient grows with the length of the responses.

No torch here: configs are written and read on machines that never train.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from math import isfinite, log
from typing import Any

from inner.errors import InnerError


class ChannelError(InnerError, ValueError):
    """The settings of the channels contradict themselves."""


TEACHERS = ("round", "frozen", "ema", "live")
CONTEXTS = ("hint", "rollout")
WRAPPERS = ("none", "taid", "entropy_opd", "eopd")
DPO_VARIANTS = ("dpo", "simpo")


@dataclass(frozen=True)
class ChannelSettings:
    """sdpo_context   "hint": a hint in front of each failed turn, Σ over the turns' tokens / rollouts
                   "rollout": the SDPO paper: the whole response again, behind a sibling's success and the errors
    sdpo_teacher   whose weights: "round" θ_t as committed, the same on every replica (without a run: as they came in)
                   · "frozen" θ₀ · "ema" this session's own average · "live" those of this very step
    sdpo_wrapper   "none" generalized JSD · "taid" · "entropy_opd" soft gate · "eopd" hard gate
    dpo_variant    "dpo" against θ₀, with anchors: label smoothing, NLL, DPO-Positive · "simpo" without a reference
    """

    policy_weight: float = 1.0  # 0: distillation alone, as in the SDPO paper
    schedule_steps: int | None = None

    alpha_sdpo: float = 0.0
    alpha_sdpo_end: float | None = None
    sdpo_context: str = "hint"
    sdpo_teacher: str = "round"
    sdpo_ema_rate: float = 0.01  # per inner step
    sdpo_wrapper: str = "none"
    sdpo_jsd_beta: float = 0.5
    sdpo_temperature: float = 1.0
    sdpo_token_clip: float | None = None
    sdpo_top_k: int = 100  # "rollout" only: the student's likeliest tokens, and one bucket for all others
    sdpo_success: float = 1.0  # "rollout" only: the reward from which on a rollout is shown to its siblings
    taid_t_start: float = 0.4
    taid_t_end: float = 1.0
    entropy_opd_h_max: float | None = None  # nats; None is log V, at which the gate hardly opens
    eopd_threshold: float | None = None  # nats of the teacher's entropy, above which forward KL is added

    beta_replay: float = 0.0
    beta_replay_end: float | None = None
    dpo_variant: str = "dpo"
    replay_batch_size: int = 8  # pairs per forward and backward pass
    replay_skip_unfit: bool = False  # leave out pairs that the model's chat template cannot write, or that are too long
    replay_dpo_beta: float = 0.1
    replay_label_smoothing: float = 0.0
    replay_nll_weight: float = 0.0
    replay_dpop_lambda: float = 0.0
    simpo_beta: float = 2.0
    simpo_gamma: float = 1.0

    def __post_init__(self) -> None:
        self.check_channels()

    # the menu at a step

    @property
    def uses_sdpo(self) -> bool:
        return self.alpha_sdpo > 0 or (self.alpha_sdpo_end or 0) > 0

    @property
    def uses_replay(self) -> bool:
        return self.beta_replay > 0 or (self.beta_replay_end or 0) > 0

    @property
    def may_collapse(self) -> bool:
        """A model that follows itself at full weight: measured, reward .94 to 0."""
        return self.sdpo_teacher == "live" and max(self.alpha_sdpo, self.alpha_sdpo_end or 0) >= 1

    def taid_t_at(self, step: int) -> float:
        return linear_ramp(self.taid_t_start, self.taid_t_end, step, self.schedule_steps)

    # contradictions

    def check_channels(self) -> None:
        """Raises ChannelError."""
        _one_of("sdpo_teacher", self.sdpo_teacher, TEACHERS)
        _one_of("sdpo_context", self.sdpo_context, CONTEXTS)
        _one_of("sdpo_wrapper", self.sdpo_wrapper, WRAPPERS)
        _one_of("dpo_variant", self.dpo_variant, DPO_VARIANTS)
        self._check_numbers()
        self._check_ranges()
        self._check_schedule()
        if self.sdpo_context == "rollout" and (self.sdpo_wrapper != "none" or self.sdpo_token_clip is not None):
            raise ChannelError(
                f'sdpo_context = "rollout" has the SDPO paper\'s own loss, which takes no sdpo_wrapper = '
                f"{self.sdpo_wrapper!r} and no sdpo_token_clip = {self.sdpo_token_clip}. Leave them out."
            )
        if self.sdpo_wrapper == "eopd" and self.eopd_threshold is None:
            raise ChannelError(
                'sdpo_wrapper = "eopd" adds forward KL where the teacher\'s entropy is above eopd_threshold, which is '
                "not set. Set it, in nats: a high quantile of the teacher's entropies, 0.8 say."
            )
        self._check_inert()

    def _check_inert(self) -> None:
        """A setting that nothing reads would leave a run that is not the one that was asked for."""
        for condition, holds, names in READ_ONLY_WHERE:
            refuse_unread(self, names, holds(self), condition)
        if self.policy_weight == 0 and not (self.uses_sdpo or self.uses_replay):
            raise ChannelError(
                "policy_weight = 0 with alpha_sdpo = 0 and beta_replay = 0 learns nothing. Set alpha_sdpo = 1 for the "
                "SDPO paper's method, or leave policy_weight out."
            )
        clip = self.sdpo_token_clip
        highest = highest_jsd_entry(self.sdpo_jsd_beta)
        if clip is not None and clip >= highest:
            raise ChannelError(
                f"sdpo_token_clip = {clip} never clips: at sdpo_jsd_beta = {self.sdpo_jsd_beta} no vocabulary entry "
                f"exceeds {highest:.3f}. Set it below that (OPSD: 0.05, with sdpo_jsd_beta = 0), or leave it out."
            )

    def _check_numbers(self) -> None:
        least_zero = ["policy_weight", "alpha_sdpo", "alpha_sdpo_end", "beta_replay", "beta_replay_end"]
        least_zero += ["replay_label_smoothing", "replay_nll_weight", "replay_dpop_lambda", "simpo_gamma"]
        least_zero += ["eopd_threshold"]
        for name in least_zero:
            if (value := getattr(self, name)) is not None and not (isfinite(value) and value >= 0):
                raise ChannelError(f"{name} = {value} must be 0 (off) or more. Set {name}.")
        above = ["sdpo_temperature", "sdpo_token_clip", "sdpo_top_k", "sdpo_ema_rate", "entropy_opd_h_max"]
        above += ["replay_batch_size", "replay_dpo_beta", "simpo_beta", "schedule_steps"]
        for name in above:
            if (value := getattr(self, name)) is not None and not (isfinite(value) and value > 0):
                optional = "; leave it out for no clip" if name == "sdpo_token_clip" else ""
                raise ChannelError(f"{name} = {value} must be greater than 0{optional}. Set {name}.")

    def _check_ranges(self) -> None:
        if not 0 <= self.sdpo_jsd_beta <= 1:
            raise ChannelError(
                f"sdpo_jsd_beta = {self.sdpo_jsd_beta} is outside [0, 1]. Set 0 (forward KL), 0.5 (JSD) or 1 (reverse "
                "KL)."
            )
        if self.sdpo_ema_rate > 1:
            raise ChannelError(f"sdpo_ema_rate = {self.sdpo_ema_rate} is above 1. Set 0.01, or 0.05 as the paper does.")
        if self.replay_label_smoothing >= 0.5:
            raise ChannelError(
                f"replay_label_smoothing = {self.replay_label_smoothing}: from 0.5 on the rejected response would be "
                "preferred. Set it below 0.5."
            )
        if not 0 <= self.taid_t_start <= self.taid_t_end <= 1:
            raise ChannelError(
                f"taid_t_start = {self.taid_t_start} and taid_t_end = {self.taid_t_end} must be 0 <= start <= end <= 1."
            )

    def _check_schedule(self) -> None:
        moving = [name for name in ("alpha_sdpo_end", "beta_replay_end") if getattr(self, name) is not None]
        moving += ["sdpo_wrapper = 'taid'"] if self.sdpo_wrapper == "taid" else []
        if moving and self.schedule_steps is None:
            raise ChannelError(
                f"{moving[0]} moves with the committed outer steps, and nothing says over how many. Set schedule_steps "
                "to the number of outer steps of the run, or to fewer."
            )
        if self.schedule_steps is not None and not moving:
            raise ChannelError(
                f"schedule_steps = {self.schedule_steps} moves nothing. Set alpha_sdpo_end, beta_replay_end or "
                "sdpo_wrapper = 'taid', or leave it out."
            )


# (condition, does it hold, the settings that are read nowhere else)
READ_ONLY_WHERE: tuple[tuple[str, Callable[[ChannelSettings], bool], tuple[str, ...]], ...] = (
    (
        "alpha_sdpo or alpha_sdpo_end is above 0",
        lambda s: s.uses_sdpo,
        ("sdpo_context", "sdpo_teacher", "sdpo_ema_rate", "sdpo_wrapper", "sdpo_jsd_beta", "sdpo_temperature",
         "sdpo_token_clip", "sdpo_top_k", "sdpo_success", "taid_t_start", "taid_t_end", "entropy_opd_h_max",
         "eopd_threshold"),
    ),
    ('sdpo_teacher = "ema"', lambda s: s.sdpo_teacher == "ema", ("sdpo_ema_rate",)),
    ('sdpo_context = "rollout"', lambda s: s.sdpo_context == "rollout", ("sdpo_top_k", "sdpo_success")),
    ('sdpo_wrapper = "none"', lambda s: s.sdpo_wrapper == "none", ("sdpo_jsd_beta", "sdpo_token_clip")),
    ('sdpo_wrapper = "taid"', lambda s: s.sdpo_wrapper == "taid", ("taid_t_start", "taid_t_end")),
    ('sdpo_wrapper = "entropy_opd"', lambda s: s.sdpo_wrapper == "entropy_opd", ("entropy_opd_h_max",)),
    ('sdpo_wrapper = "eopd"', lambda s: s.sdpo_wrapper == "eopd", ("eopd_threshold",)),
    (
        "beta_replay or beta_replay_end is above 0",
        lambda s: s.uses_replay,
        ("dpo_variant", "replay_batch_size", "replay_skip_unfit", "replay_dpo_beta", "replay_label_smoothing",
         "replay_nll_weight", "replay_dpop_lambda", "simpo_beta", "simpo_gamma"),
    ),
    (
        'dpo_variant = "dpo"',
        lambda s: s.dpo_variant == "dpo",
        ("replay_dpo_beta", "replay_label_smoothing", "replay_nll_weight", "replay_dpop_lambda"),
    ),
    ('dpo_variant = "simpo"', lambda s: s.dpo_variant == "simpo", ("simpo_beta", "simpo_gamma")),
)  # fmt: skip


def refuse_unread(
    settings: Any, names: tuple[str, ...], is_read: bool, condition: str, error: type[InnerError] = ChannelError
) -> None:
    """Raises for the first of `names` that is not at its default, unless they are read here."""
    for name in () if is_read else names:
        value = getattr(settings, name)
        default = type(settings).__dataclass_fields__[name].default
        if value != default:
            raise error(
                f"{name} = {value!r} does nothing here: it is read only where {condition}. Leave {name} out, or make "
                "that so."
            )


def highest_jsd_entry(beta: float) -> float:
    """The largest summand that one vocabulary entry can have (inner/losses/divergence.py). For 0 < β < 1 it is convex
    in both probabilities, so it is highest where one of them is 1 and the other 0; a KL has no bound."""
    return float("inf") if beta in (0, 1) else max(-beta * log(beta), -(1 - beta) * log(1 - beta))


CHANNEL_FIELDS = tuple(f.name for f in fields(ChannelSettings))


def channels_of(config: object) -> dict[str, Any]:
    """The channel settings of anything that has them."""
    return {name: getattr(config, name) for name in CHANNEL_FIELDS}


def pop_channel_settings(options: dict[str, Any]) -> Mapping[str, Any]:
    """The channel settings among keyword arguments, taken out of them."""
    return {name: options.pop(name) for name in CHANNEL_FIELDS if name in options}


def linear_ramp(start: float, end: float | None, step: int, steps: int | None) -> float:
    if end is None or steps is None:
        return start
    return start + (end - start) * min(1.0, max(0, step) / steps)


def _one_of(name: str, value: str, valid: tuple[str, ...]) -> None:
    if value not in valid:
        raise ChannelError(f"{name} = {value!r} is not known. One of: {', '.join(valid)}.")
