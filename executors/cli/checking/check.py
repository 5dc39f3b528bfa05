"""`diloco check CONFIG`: shows the rewards of the first prompts, before a launch (inner/usercode/trial.py).

Not promised: that the reward is right; only you know whether its numbers are as intended.
"""

from inner.usercode.trial import PromptTrial, Trial

WIDTH = 72


def check_lines(trial: Trial, reward: str) -> list[str]:
    """Return the lines that `diloco check` prints.   reward: its name in the config."""
    shortest, longest = trial.tokens
    how = "through the model's chat template" if trial.template else "as plain text"
    lines = [f"{trial.prompts} prompts of {shortest} to {longest} tokens, {how}"]
    for number, tried in enumerate(trial.trials, 1):
        lines += _prompt_lines(number, tried)
    calls = len(trial.trials)
    lines.append(f"{reward} answered {len(trial.rewards)} completions in {1000 * trial.seconds:.3g} ms ({calls} calls)")
    return lines + _warnings(trial, reward)


def _prompt_lines(number: int, tried: PromptTrial) -> list[str]:
    lines = [f"prompt {number}: {_shorten(tried.prompt)}"]
    for scored in tried.scored:
        value = "cannot say" if scored.reward is None else f"{scored.reward:g}"
        text = "an empty completion" if scored.source == "empty" else f"{scored.source}: {_shorten(scored.completion)}"
        lines.append(f"  {value:>10}   {text}")
    return lines


def _warnings(trial: Trial, reward: str) -> list[str]:
    if trial.cut:
        return [f"warning: {trial.cut}"]
    values = set(trial.rewards)
    if values == {None}:
        return [f"warning: {reward} returned no number for any completion; a run with it learns nothing"]
    if len(values) == 1:
        return [
            f"warning: every completion got {next(iter(values)):g}, and a group of equal rewards teaches nothing. "
            f'{trial.cause}Try an answer that should be worth more: --completion "…"'
        ]
    return []


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= WIDTH else f"{flat[: WIDTH - 1]}…"
