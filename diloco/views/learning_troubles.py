"""Detect troubles of learning: no signal, rewards that may be hacked, tools, overfitting, masked sequences,
preferences that make the chosen responses unlikely.

    band of KL, entropy, length     median ± 6 · 1.4826 · MAD of the run's first 10 outer steps, or as BANDS if wider
      ├─ outside in each of the newest 3 steps, and
      └─ newest rewards above the first ones by more than their scatter     ──▶ reward_hacking, from the first outside

    held out   0.31 ± .02 … 0.24 ± .02     newest < best − 2 · √(se² + se²), while training rewards rose ──▶ overfitting

Each detector is a pure function of a report.  Numbers are means over the replicas that were read.

Not promised: that a reward is hacked, because policies change as they learn.  A text names the outer steps whose
completions you should read (`flagged_steps`).
"""

import math
from collections.abc import Sequence
from statistics import fmean, median

from diloco.runlog.evaluation import Evaluation, score_words
from diloco.runlog.learning import over_replicas
from diloco.runlog.reader import Report
from diloco.runlog.scope import AT_FIRST
from diloco.runlog.steps import Step
from diloco.views.trouble import Spending, Trouble, trouble

FIRST_STEPS = AT_FIRST  # number of first outer steps from which the band is computed
LEAST_FIRST = 6
NEWEST = 3  # successive outer steps before a trouble is reported
SAME_REWARDS = 5  # successive outer steps whose groups all have equal rewards
EMPTY_STEPS = 3  # successive outer steps whose mean was zero
WIDTH = 6 * 1.4826  # half of the band's width, in units of MAD: six standard deviations of normal noise
ERRORS = 2.0  # standard errors of a difference of two evaluations
APART, APART_ERRORS = 0.5, 4.0  # greedy and sampled differ strongly: share of the larger mean, standard errors
TOOL_FAILURES = 0.5
BROKEN = 0.05  # share of completions that break the reward; no report below FEWER times the first share
FEWER = 0.9
MASKED = 0.05  # share of sequences, as in the inner loop's warning
RIGHT, FALL = 0.7, 0.25  # share of pairs that are ranked right; part by which the chosen log-prob falls
CHOSEN = "replay_chosen_logp"
BANDS = {  # metric: (its label, smallest and largest multiple of the median inside the band, least half of its width)
    "kl": ("KL", 0.0, 5.0, 0.1),
    "completion_length": ("completion length", 0.5, 2.0, 4.0),
    "entropy": ("entropy", 0.25, 2.0, 0.2),
}


# -------------------------------------------------------------------- no signal


def no_signal(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find successive outer steps in which all groups have equal rewards, or the mean is zero."""
    empty = _newest_in_a_row([step.empty for step in report.steps])
    if empty >= EMPTY_STEPS:
        causes = [str(e["cause"]) for e in report.of_kind("nothing_learned") if e.get("cause")][-1:]
        text = "; ".join([f"the mean was zero in the newest {empty} outer steps, so nothing was learned", *causes])
        return [_no_signal(text, report.steps[-empty].t)]
    known = [(step, same) for step in report.steps if (same := _has_equal_groups(step)) is not None]
    same = _newest_in_a_row([same for _, same in known])
    if same < SAME_REWARDS:
        return []
    level = known[-1][0].mean_reward
    of = "" if level is None else f" (mean {level:.3g})"
    text = f"all completions of each prompt have equal rewards{of} in the newest {same} outer steps: no advantage"
    return [_no_signal(text, known[-same][0].t)]


def _no_signal(text: str, step: int) -> Trouble:
    advice = "use prompts that are neither too hard nor too easy, a reward with more levels, or larger groups"
    return trouble("no_signal", text, advice, step=step)


def _newest_in_a_row(found: Sequence[bool]) -> int:
    return next((i for i, one in enumerate(reversed(found)) if not one), len(found))


def _has_equal_groups(step: Step) -> bool | None:
    """Whether all groups of the step have equal rewards; None if no replica measured it."""
    known = [numbers for numbers in step.learned.values() if "equal_groups" in numbers or "reward_std" in numbers]
    return all(n.get("equal_groups", float(n.get("reward_std", 1.0) == 0.0)) >= 1.0 for n in known) if known else None


# -------------------------------------------------------------------- rewards that may be hacked


def reward_hacking(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find a KL, completion length or entropy that left its band while the reward rose."""
    rewards = _values(report.steps, "reward")
    if (rise := _rise(rewards)) is None:
        return []
    outside = [found for name in BANDS if (found := _outside(name, _values(report.steps, name))) is not None]
    if not outside:
        return []
    step = min(t for t, _ in outside)
    words = ", ".join(text for _, text in outside)
    text = f"{words}, while the reward rose from {rise[0]:.3g} to {rise[1]:.3g}: it may be hacked"
    advice = f"read completions of outer steps {step} to {report.steps[-1].t} (`diloco watch RUN`, key o)"
    return [trouble("reward_hacking", text, advice, step=step)]


def flagged_steps(troubles: Sequence[Trouble], head: int) -> range:
    """Return the outer steps whose completions the user should read."""
    first = min((found.step for found in troubles if found.kind == "reward_hacking"), default=head)
    return range(first, head)


def _values(steps: Sequence[Step], name: str) -> list[tuple[int, float]]:
    """Return (outer step, mean over replicas) of each step with a finite value."""
    found = [(s.t, s.mean_reward if name == "reward" else over_replicas(s, (name,)).get(name)) for s in steps]
    return [(t, value) for t, value in found if value is not None and math.isfinite(value)]


def _first_and_later(values: Sequence[tuple[int, float]]) -> tuple[list[float], list[tuple[int, float]]] | None:
    """Split into the first outer steps' values and the others; None if too few of either are known."""
    first = [value for t, value in values if t < FIRST_STEPS]
    later = [(t, value) for t, value in values if t >= FIRST_STEPS]
    return (first, later) if len(first) >= LEAST_FIRST and len(later) >= NEWEST else None


def _rise(rewards: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return the reward of the first and of the newest steps, if it rose by more than the scatter of the first."""
    split = _first_and_later(rewards)
    if split is None:
        return None
    first = median(split[0])
    newest = median(value for _, value in split[1][-NEWEST:])
    scatter = 1.4826 * median(abs(value - first) for value in split[0])
    return (first, newest) if newest - first > max(scatter, 0.05 * abs(first)) else None


def _outside(name: str, values: Sequence[tuple[int, float]]) -> tuple[int, str] | None:
    """Return the outer step since which a metric is outside its band, and a text; None if it is inside."""
    split = _first_and_later(values)
    if split is None:
        return None
    word, least, most, floor = BANDS[name]
    middle = median(split[0])
    width = max(floor, WIDTH * median(abs(value - middle) for value in split[0]))
    low, high = min(least * middle, middle - width), max(most * middle, middle + width)
    count = _newest_in_a_row([not low <= value <= high for _, value in split[1]])
    if count < NEWEST:
        return None
    step, newest = split[1][-count][0], split[1][-1][1]
    band = f"below {high:.3g}" if low <= 0 else f"{low:.3g} to {high:.3g}"
    return step, f"{word} is {newest:.3g} since outer step {step} (its band: {band})"


def reward_broken(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find completions that break the reward and do not become fewer."""
    share = _newest_mean(report.steps, "reward_broken")
    before = [value for t, value in _values(report.steps[:-NEWEST], "reward_broken") if t < FIRST_STEPS]
    if share is None or share < BROKEN or (before and share < FEWER * fmean(before)):
        return []
    since = f", {fmean(before):.1%} at first" if before else ""
    text = f"{share:.1%} of the completions of the newest {NEWEST} outer steps broke the reward{since}"
    advice = "let the reward return a low number for what it cannot read (`diloco watch RUN`, key o, has completions)"
    return [trouble("reward_broken", text, advice, step=report.steps[-NEWEST].t)]


# -------------------------------------------------------------------- tools, engine, evaluation


def tool_failures(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find a run in which half of the tool calls fail."""
    share = _newest_mean(report.steps, "tool_failures")
    if share is None or share < TOOL_FAILURES:
        return []
    text = f"{share:.0%} of the tool calls of the newest {NEWEST} outer steps failed"
    advice = "read the tools' answers (`diloco watch RUN`, key o); call them by hand with those arguments"
    return [trouble("tool_failures", text, advice, step=report.steps[-NEWEST].t)]


def masked(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find a run with many masked completions, because vLLM's policy is too far from the trainer's."""
    share = _newest_mean(report.steps, "importance_masked")
    if share is None or share <= MASKED:
        return []
    share_of = f"{share:.0%} of the completions (token_mask: tokens) of the newest {NEWEST} outer steps"
    text = f"{share_of} teach nothing: vLLM's log-probabilities differ too much from the trainer's"
    advice = 'set inner.vllm.dtype to inner.dtype, or inner.vllm.importance_mode = "token_truncate"'
    return [trouble("masked", text, advice, step=report.steps[-NEWEST].t)]


def replay_falls(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find pairs that are ranked right while their chosen responses become unlikely (Pal et al. 2024, DPO-Positive)."""
    right, split = _newest_mean(report.steps, "replay_accuracy"), _first_and_later(_values(report.steps, CHOSEN))
    if right is None or right < RIGHT or split is None:
        return []
    first, newest = median(split[0]), [value for _, value in split[1][-NEWEST:]]
    scatter = WIDTH * median(abs(value - first) for value in split[0])
    if first - max(newest) <= max(FALL * abs(first), scatter):
        return []
    text = f"log p of the chosen responses fell from {first:.3g} to {median(newest):.3g} (nats per response), "
    text += f"while {right:.0%} of the pairs are ranked right: the loss makes both responses of a pair unlikely"
    advice = "set inner.replay.nll_weight = 1, or raise it: this weight adds the loss of the chosen responses"
    return [trouble("replay_falls", text, advice, step=split[1][-NEWEST][0])]


def _newest_mean(steps: Sequence[Step], name: str) -> float | None:
    found = [numbers[name] for step in steps[-NEWEST:] if name in (numbers := over_replicas(step, (name,)))]
    return fmean(found) if len(found) == NEWEST else None


def overfitting(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find a held-out reward below the reward of the best evaluation, while the training reward rose."""
    found = [e for e in report.evaluations if not math.isnan(e.headline[1].error)]
    if len(found) < 2:
        return []
    newest, best = found[-1], max(found[:-1], key=lambda e: e.headline[1].mean)
    if newest.headline[0] != best.headline[0] or not _fell(best, newest):
        return []
    before, after = _reward_around(report.steps, best.step), _reward_around(report.steps, newest.step)
    if before is None or after is None or after <= before:
        return []
    scores = " to ".join(score_words(e.headline[1]) for e in (best, newest))
    text = f"held out, the reward fell from {scores} (θ_{best.step} to θ_{newest.step}), while the training"
    text += f" reward rose from {before:.3g} to {after:.3g}"
    advice = (
        f"export θ_{best.step} (`diloco export RUN --best`), or go back: `diloco train CONFIG --from RUN@{best.step}`"
    )
    return [trouble("overfitting", text, advice, step=best.step)]


def held_out_differs(report: Report, now: float, spent: Spending | None) -> list[Trouble]:
    """Find very different rewards of greedy and sampled answers to the held-out prompts."""
    newest = report.evaluations[-1:]
    if not newest or len(newest[0].rewards) < 2:
        return []
    (_, greedy), (_, sampled) = newest[0].rewards
    apart = abs(greedy.mean - sampled.mean)
    errors = [error for error in (greedy.error, sampled.error) if not math.isnan(error)]
    if apart <= APART * max(abs(greedy.mean), abs(sampled.mean)) or apart <= APART_ERRORS * math.hypot(*errors):
        return []
    step = newest[0].step
    text = f"held out @{step}: greedy {score_words(greedy)}, but sampled {score_words(sampled)}: "
    if greedy.mean > sampled.mean:
        text += "sampling probably takes bad tokens where the likeliest ones are good; training learns from samples"
        advice = "lower inner.sampling.temperature, or set top_p in [inner.trl]; `diloco watch RUN`, key o: completions"
    else:
        text += "the likeliest tokens probably end in a loop, or never end"
        advice = "read greedy completions of an export; try a larger max_completion_length, or sample when you use it"
    return [trouble("held_out_differs", text, advice, step=step)]


def _fell(best: Evaluation, newest: Evaluation) -> bool:
    """Whether the score fell by more than the noise of both.  The prompts are equal, so the true noise is smaller."""
    one, other = best.headline[1], newest.headline[1]
    return one.mean - other.mean > ERRORS * math.hypot(one.error, other.error)


def _reward_around(steps: Sequence[Step], t: int) -> float | None:
    """Return the mean training reward of the last outer steps before θ_t."""
    rewards = [r for step in steps if t - NEWEST <= step.t < max(t, 1) and (r := step.mean_reward) is not None]
    return fmean(rewards) if rewards else None
