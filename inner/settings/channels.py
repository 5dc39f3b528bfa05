"""Defines the settings of the loss's channels, [inner.sdpo], [inner.replay] and [inner.process], and how the channels'
weights change over a run.

    total(t) = grpo.weight · policy  +  α(t) · sdpo  +  β(t) · replay           t: the committed outer step

    α(t)   sdpo.weight   ──▶ sdpo.weight_end       ╲  straight lines over the first `schedule.weight_steps` committed
    β(t)   replay.weight ──▶ replay.weight_end      ▏ steps, then constant; without an end, constant from the start
    TAID   sdpo.taid_t_start ──▶ sdpo.taid_t_end   ╱

The weights depend on t alone. So all replicas at step t optimise the same loss, and a new session continues with the
weights of the run's step.

Not promised: that a weight has the same effect with another kernel. The divergence's scale jumps at sdpo.jsd_beta = 0
and 1, and DPO's gradient grows with the length of the responses.

No torch here: machines that never train also read and write configs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import log
from typing import Any, ClassVar

from inner.errors import InnerError
from inner.settings.tables import Table, default_of, setting


class ChannelError(InnerError, ValueError):
    """The settings of the channels contradict each other."""


TEACHERS = ("round", "frozen", "ema", "live")
CONTEXTS = ("hint", "rollout")
WRAPPERS = ("none", "taid", "entropy_opd", "eopd")
DPO_VARIANTS = ("dpo", "simpo")
CREDITS = ("turn", "rest")
WHOLE_SEQUENCE_LOSSES = ("gmpo",)  # loss types whose formula has one advantage per rollout


@dataclass(frozen=True)
class SdpoSettings(Table):
    """Self-distillation: a teacher that also reads a hint or a successful answer scores the model's own answers."""

    path: ClassVar[str] = "inner.sdpo"
    error: ClassVar[type[Exception]] = ChannelError

    weight: float = setting(0.0, "α, the weight of the distillation in the loss; 0 is off.", least=0)
    weight_end: float | None = setting(
        None, "α after `schedule.weight_steps` committed outer steps; if not set, α is constant.", least=0
    )
    context: str = setting(
        "hint",
        '"hint": a hint precedes each failed turn; the loss is the sum over the turns\' tokens / rollouts. '
        '"rollout": as in the SDPO paper, the teacher reads a sibling\'s success and the errors, then the response.',
        one_of=CONTEXTS,
    )
    teacher: str = setting(
        "round",
        'Weights of the teacher: "round": θ_t as committed, the same on every replica (without a run: θ₀), '
        '"frozen": θ₀, "ema": this session\'s own average, "live": the weights of the current step.',
        one_of=TEACHERS,
    )
    ema_rate: float = setting(
        0.01, 'Rate at which `teacher = "ema"` follows the policy, per inner step.', above=0, most=1
    )
    wrapper: str = setting(
        "none",
        '"none": generalized JSD, "taid": TAID, "entropy_opd": a soft gate, "eopd": a hard gate.',
        one_of=WRAPPERS,
    )
    jsd_beta: float = setting(0.5, "0 is forward KL, 0.5 JSD, 1 reverse KL.", least=0, most=1)
    temperature: float = setting(1.0, "Divides the logits of student and teacher.", above=0)
    token_clip: float | None = setting(
        None, "Upper limit of one vocabulary entry's part in the divergence; if not set, no limit.", above=0
    )
    top_k: int = setting(
        100, '`context = "rollout"` only: number of likeliest tokens to compare; one bucket has the rest.', above=0
    )
    success: float = setting(
        1.0, '`context = "rollout"` only: a rollout with at least this reward is shown to its siblings.'
    )
    taid_t_start: float = setting(0.4, "TAID's t at outer step 0.", least=0, most=1)
    taid_t_end: float = setting(1.0, "TAID's t after `schedule.weight_steps` outer steps.", least=0, most=1)
    entropy_opd_h_max: float | None = setting(
        None, "Entropy in nats at which the soft gate is fully open (default: log V, so it hardly opens).", above=0
    )
    eopd_threshold: float | None = setting(
        None, "Teacher's entropy in nats above which the hard gate adds forward KL.", least=0
    )

    @property
    def is_used(self) -> bool:
        return self.weight > 0 or (self.weight_end or 0) > 0

    @property
    def may_collapse(self) -> bool:
        """Whether the live model is its own teacher with weight ≥ 1. In a measurement the reward fell from .94 to 0."""
        return self.teacher == "live" and max(self.weight, self.weight_end or 0) >= 1

    def check(self) -> None:
        if self.taid_t_start > self.taid_t_end:
            raise ChannelError(
                f"inner.sdpo.taid_t_start = {self.taid_t_start} and inner.sdpo.taid_t_end = {self.taid_t_end} must be "
                "0 <= start <= end <= 1."
            )
        if self.context == "rollout" and (self.wrapper != "none" or self.token_clip is not None):
            raise ChannelError(
                f'inner.sdpo.context = "rollout" has the SDPO paper\'s own loss, which takes no inner.sdpo.wrapper = '
                f"{self.wrapper!r} and no inner.sdpo.token_clip = {self.token_clip}. Leave them out."
            )
        if self.wrapper == "eopd" and self.eopd_threshold is None:
            raise ChannelError(
                'inner.sdpo.wrapper = "eopd" adds forward KL where the teacher\'s entropy is above '
                "inner.sdpo.eopd_threshold, which is not set. Set it, in nats: a high quantile of the teacher's "
                "entropies, for example 0.8."
            )
        clip = self.token_clip
        highest = highest_jsd_entry(self.jsd_beta)
        if clip is not None and self.wrapper == "none" and clip >= highest:
            raise ChannelError(
                f"inner.sdpo.token_clip = {clip} never clips: at inner.sdpo.jsd_beta = {self.jsd_beta} no vocabulary "
                f"entry exceeds {highest:.3f}. Set token_clip below that (OPSD: 0.05, with inner.sdpo.jsd_beta = 0), "
                "or leave it out."
            )


@dataclass(frozen=True)
class ReplaySettings(Table):
    """Preference pairs, for example from a run's own traces."""

    path: ClassVar[str] = "inner.replay"
    error: ClassVar[type[Exception]] = ChannelError

    weight: float = setting(0.0, "β, the weight of the preference loss on `pairs`; 0 is off.", least=0)
    weight_end: float | None = setting(
        None, "β after `schedule.weight_steps` committed outer steps; if not set, β is constant.", least=0
    )
    pairs: str | None = setting(None, "A .jsonl file of pairs from `save_pairs`, or in TRL's form (prompt, chosen …).")
    variant: str = setting(
        "dpo", '"dpo" against θ₀, with anchors below, or "simpo" without a reference.', one_of=DPO_VARIANTS
    )
    batch_size: int = setting(8, "Pairs per forward and backward pass.", above=0)
    skip_unfit: bool = setting(
        False, "Leave out pairs that the model's chat template cannot write, or that are too long."
    )
    dpo_beta: float = setting(0.1, "β of DPO.", above=0)
    label_smoothing: float = setting(0.0, "Anchor of DPO: the probability that a pair is reversed.", least=0)
    nll_weight: float = setting(0.0, "Anchor of DPO: the chosen side's NLL; 1 if pairs share most words.", least=0)
    dpop_lambda: float = setting(0.0, "Anchor of DPO: λ of DPO-Positive.", least=0)
    simpo_beta: float = setting(2.0, "β of SimPO.", above=0)
    simpo_gamma: float = setting(1.0, "Margin γ of SimPO, absolute.", least=0)

    @property
    def is_used(self) -> bool:
        return self.weight > 0 or (self.weight_end or 0) > 0

    def check(self) -> None:
        if self.label_smoothing >= 0.5:
            raise ChannelError(
                f"inner.replay.label_smoothing = {self.label_smoothing}: from 0.5 on the rejected response would be "
                "preferred. Set inner.replay.label_smoothing below 0.5."
            )


@dataclass(frozen=True)
class ProcessSettings(Table):
    """Scores of single turns, beside the reward.

        A_t  =  A  +  weight · Σ z_k        z_k: turn k's score, normalised over the k-th turns of the same prompt

        credit = "turn"     Σ over the turn that contains token t
        credit = "rest"     Σ over that turn and all later turns

    Not promised: that higher scores from teachers lead to a higher reward.  The model learns to raise the score."""

    path: ClassVar[str] = "inner.process"

    weight: float = setting(1.0, "w, the weight of a turn's advantage beside that of its rollout.", above=0)
    credit: str = setting(
        "turn",
        'Tokens that learn from a turn\'s score: "turn": tokens of that turn, "rest": also of earlier turns.',
        one_of=CREDITS,
    )
    function: str | None = setting(
        None, '`"process.py:score"`: a score, or None, for each turn of each rollout (docs/channels.md).'
    )
    head: str | None = setting(None, "Learned scorer that replaces `function`: a .safetensors of `ProcessHead.save`.")

    def check(self) -> None:
        if (self.function is None) == (self.head is None):
            raise InnerError(
                f"[inner.process] needs one of the two, function or head; found {self.function!r} and "
                f'{self.head!r}. Set inner.process.function = "process.py:score", or leave the table out.'
            )


@dataclass(frozen=True)
class ChannelSettings:
    """All three channels.   policy_weight: [inner.grpo] weight.   weight_steps: [inner.schedule] weight_steps."""

    policy_weight: float = 1.0
    sdpo: SdpoSettings = field(default_factory=SdpoSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    weight_steps: int | None = None

    def __post_init__(self) -> None:
        """Raise ChannelError if the three channels contradict each other."""
        self._check_schedule()
        for condition, holds, names in READ_ONLY_WHERE:
            refuse_unread(self, names, is_read=holds(self), condition=condition)
        if self.policy_weight == 0 and not (self.sdpo.is_used or self.replay.is_used):
            raise ChannelError(
                "inner.grpo.weight = 0 with inner.sdpo.weight = 0 and inner.replay.weight = 0 learns nothing. Set "
                "inner.sdpo.weight = 1 for the SDPO paper's method, or leave inner.grpo.weight out."
            )

    def taid_t_at(self, step: int) -> float:
        """Return TAID's t at outer step `step`."""
        return linear_ramp(self.sdpo.taid_t_start, self.sdpo.taid_t_end, step, self.weight_steps)

    def _check_schedule(self) -> None:
        moving = ["inner.sdpo.weight_end"] if self.sdpo.weight_end is not None else []
        moving += ["inner.replay.weight_end"] if self.replay.weight_end is not None else []
        moving += ['inner.sdpo.wrapper = "taid"'] if self.sdpo.wrapper == "taid" else []
        if moving and self.weight_steps is None:
            raise ChannelError(
                f"{moving[0]} changes with the committed outer steps, and their number is not set. Set "
                "inner.schedule.weight_steps to the number of outer steps of the run, or to fewer."
            )
        if self.weight_steps is not None and not moving:
            raise ChannelError(
                f"inner.schedule.weight_steps = {self.weight_steps} changes nothing. Set inner.sdpo.weight_end, "
                'inner.replay.weight_end or inner.sdpo.wrapper = "taid", or leave it out.'
            )


# (condition, function that tests it, settings that are read only under it)
READ_ONLY_WHERE: tuple[tuple[str, Callable[[ChannelSettings], bool], tuple[str, ...]], ...] = (
    (
        "inner.sdpo.weight or inner.sdpo.weight_end is above 0",
        lambda s: s.sdpo.is_used,
        ("sdpo.context", "sdpo.teacher", "sdpo.ema_rate", "sdpo.wrapper", "sdpo.jsd_beta", "sdpo.temperature",
         "sdpo.token_clip", "sdpo.top_k", "sdpo.success", "sdpo.taid_t_start", "sdpo.taid_t_end",
         "sdpo.entropy_opd_h_max", "sdpo.eopd_threshold"),
    ),
    ('inner.sdpo.teacher = "ema"', lambda s: s.sdpo.teacher == "ema", ("sdpo.ema_rate",)),
    ('inner.sdpo.context = "rollout"', lambda s: s.sdpo.context == "rollout", ("sdpo.top_k", "sdpo.success")),
    ('inner.sdpo.wrapper = "none"', lambda s: s.sdpo.wrapper == "none", ("sdpo.jsd_beta", "sdpo.token_clip")),
    ('inner.sdpo.wrapper = "taid"', lambda s: s.sdpo.wrapper == "taid", ("sdpo.taid_t_start", "sdpo.taid_t_end")),
    ('inner.sdpo.wrapper = "entropy_opd"', lambda s: s.sdpo.wrapper == "entropy_opd", ("sdpo.entropy_opd_h_max",)),
    ('inner.sdpo.wrapper = "eopd"', lambda s: s.sdpo.wrapper == "eopd", ("sdpo.eopd_threshold",)),
    (
        "inner.replay.weight or inner.replay.weight_end is above 0",
        lambda s: s.replay.is_used,
        ("replay.variant", "replay.batch_size", "replay.skip_unfit", "replay.dpo_beta", "replay.label_smoothing",
         "replay.nll_weight", "replay.dpop_lambda", "replay.simpo_beta", "replay.simpo_gamma"),
    ),
    (
        'inner.replay.variant = "dpo"',
        lambda s: s.replay.variant == "dpo",
        ("replay.dpo_beta", "replay.label_smoothing", "replay.nll_weight", "replay.dpop_lambda"),
    ),
    (
        'inner.replay.variant = "simpo"',
        lambda s: s.replay.variant == "simpo",
        ("replay.simpo_beta", "replay.simpo_gamma"),
    ),
)  # fmt: skip


def refuse_unread(
    settings: Any, names: tuple[str, ...], *, is_read: bool, condition: str, error: type[InnerError] = ChannelError
) -> None:
    """Raise `error` for the first of `names` that is not at its default. Do nothing if `is_read`.

    names: "key" or "table.key", as attributes of `settings`.
    """
    for name in () if is_read else names:
        table, _, key = name.rpartition(".")
        owner = getattr(settings, table) if table else settings
        value = getattr(owner, key)
        if value != default_of(type(owner).__dataclass_fields__[key]):
            raise error(
                f"inner.{name} = {value!r} does nothing here: it is read only where {condition}. Leave inner.{name} "
                "out, or change the other setting."
            )


def highest_jsd_entry(beta: float) -> float:
    """Return the largest value of one vocabulary entry's term (inner/losses/divergence.py). For 0 < β < 1 the term is
    convex in both probabilities: the maximum has one of them at 1, the other at 0. For β = 0 or 1 (KL): infinity."""
    return float("inf") if beta in (0, 1) else max(-beta * log(beta), -(1 - beta) * log(1 - beta))


def linear_ramp(start: float, end: float | None, step: int, steps: int | None) -> float:
    if end is None or steps is None:
        return start
    return start + (end - start) * min(1.0, max(0, step) / steps)
