"""Train on a bundle that was found in place of new rollouts.

    bundle ──why_unfit──▶ "" ──replaying──▶ TRL's own generation, with the recorded tokens, turns and rewards in it
                       └─▶ a reason: another trainer's, other rows, tokens, prompts, or weights too far away (drift.py)

Not promised: that the recorded rewards are what this trainer's rewards would say.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from inner.rollouts.at_once.environments import drawn_environments
from inner.rollouts.recording import drift
from inner.rollouts.recording.bundle import Bundle, TooFar
from inner.rollouts.recording.unpack import restore
from inner.settings.contradictions import UNCORRECTED


@contextmanager
def replaying(trainer: Any, bundle: Bundle, inputs: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Let the trainer's generation give this bundle inside a `with`; it then draws from the recorded random states.

    inputs: the rows."""
    functions = trainer.reward_funcs
    trainer.replayed, trainer.reward_funcs = bundle, [_always(column) for column in bundle.rewards.T.tolist()]
    try:
        with _without_resets(drawn_environments(trainer, inputs)):
            yield
    finally:
        trainer.replayed, trainer.reward_funcs = None, functions
    restore(bundle.random)


def why_unfit(trainer: Any, inputs: Sequence[Mapping[str, Any]], bundle: Bundle) -> str:
    """Return why a trainer cannot train on a bundle in the place of these rows' rollouts; "" if it can."""
    if len(inputs) != len(bundle.ids):
        return f"it has {len(bundle.ids)} rollouts, and this generation {len(inputs)}"
    if list(bundle.names) != list(trainer.reward_func_names):
        return f"its rewards are {', '.join(bundle.names)}; here they are {', '.join(trainer.reward_func_names)}"
    if (bundle.mask is not None) != bool(trainer.tools or trainer.agents):
        return "it has tool turns, and this trainer has no tools, or the other way round"
    most = trainer.accelerator.unwrap_model(trainer.model).get_input_embeddings().num_embeddings
    if not all(0 <= token < most for ids in (*bundle.prompt_ids, *bundle.ids) for token in ids):
        return f"it has tokens outside of the vocabulary of {most}"
    if any(len(ids) > trainer.max_completion_length for ids in bundle.ids):
        return f"it has completions of more than {trainer.max_completion_length} tokens"
    if bundle.logprobs is not None and (trainer.dynamic_sampling or trainer.loss_type in UNCORRECTED):
        return "it was sampled elsewhere, and this objective needs rollouts that the trained weights sampled"
    if bundle.logprobs is not None and has_dropout(trainer):
        return "it was sampled elsewhere, and inner.lora.dropout or inner.trl.disable_dropout keeps dropout in the loss"
    adds = trainer.environment_factories is not None
    if not all(_begins_as(prompt, row, adds) for prompt, row in zip(bundle.prompts, inputs, strict=True)):
        return "its prompts are those of other rows"
    if trainer.agents is None and not _renders(trainer, inputs, bundle):  # an agent writes prompts of its own
        return "its prompts have other tokens than this trainer gives them"
    if bundle.logprobs is None:
        return ""
    if why := drift.why_uncorrected(trainer, bundle):
        return why
    off = drift.drift_of(trainer, bundle)
    return "" if off <= drift.FARTHEST else TooFar(f"it is {off:.2f} nats per token from the present weights")


def has_dropout(trainer: Any) -> bool:
    """Whether the loss of this trainer has dropout.  π_old has no dropout, so the ratio to π_old would be noise."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in trainer.model.modules())


def is_truncated(trainer: Any) -> bool:
    """Whether a trainer does not sample from the softmax of all tokens."""
    args = trainer.args
    kept = args.top_p < 1 or (args.top_k or 0) > 0 or (args.min_p or 0) > 0
    return bool(kept or args.repetition_penalty != 1 or args.generation_kwargs)


def _begins_as(prompt: Any, row: Mapping[str, Any], adds: bool) -> bool:
    """Whether a recorded prompt comes from this row.   adds: an environment may have appended to the last message."""
    asked = row.get("prompt", [{"role": "user", "content": ""}])  # TRL's prompt for a row without any
    if not prompt or not isinstance(prompt, list) or not isinstance(asked, list):
        return prompt == asked
    if not adds or not isinstance(prompt[-1], dict) or not asked:
        return _plain(prompt) == _plain(asked)
    before = asked[-1].get("content")
    own = [*prompt[:-1], {**prompt[-1], "content": before}]
    return _plain(own) == _plain(asked) and _starts_with(prompt[-1].get("content"), before)


def _plain(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _starts_with(content: Any, before: Any) -> bool:
    """Whether `content` begins with `before`: a text with a text, or a list of parts with parts or a text."""
    if isinstance(content, str) and isinstance(before, str):
        return content.startswith(before)
    before = [{"type": "text", "text": before}] if isinstance(before, str) else before
    both = isinstance(content, list) and isinstance(before, list)
    return _plain(content[: len(before)] if both else content) == _plain(before)


def _renders(trainer: Any, inputs: Sequence[Mapping[str, Any]], bundle: Bundle) -> bool:
    """Whether this trainer renders the prompts as the recorded tokens.  Also True if the template reads the clock."""
    if "strftime_now" in str(trainer.chat_template or getattr(trainer.processing_class, "chat_template", "")):
        return True
    known = dict[str, list[int]]()
    for prompt, ids, row in zip(bundle.prompts, bundle.prompt_ids, inputs, strict=True):
        name = row.get("environment") if trainer._multi_environment else None
        key = f"{name}\n{json.dumps(prompt, default=str)}"
        if key not in known:
            try:
                known[key] = list(trainer._prompt_ids(prompt, name))
            except Exception:  # a template may raise any exception for messages from another process
                return False
        if known[key] != list(ids):
            return False
    return True


def _always(column: list[float]) -> Callable[..., list[float | None]]:
    return lambda **_: [None if reward != reward else reward for reward in column]


@contextmanager
def _without_resets(environments: Sequence[Any]) -> Iterator[None]:
    """Make `reset` do nothing inside a `with`: the recorded prompts have its observations."""
    quiet = [(one, vars(one).get("reset")) for one in environments if hasattr(one, "__dict__")]
    for one, _ in quiet:
        vars(one)["reset"] = lambda **_: None
    try:
        yield
    finally:
        for one, own in quiet:
            vars(one).pop("reset", None)
            vars(one).update({} if own is None else {"reset": own})
