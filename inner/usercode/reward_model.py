"""Uses a reward model: a sequence classifier whose single logit on prompt and completion is the reward, as in TRL.

    [inner.rewards.functions]
    "hub:OWNER/NAME[@REVISION]" = 1.0       its name in logs: NAME

    pin_reward_model     on the laptop: pins the commit, hub:OWNER/NAME@<commit>; checks that config.json has one label
    load_reward_model    in a replica that builds its loop: returns a function, called like any reward

    reply ─ its own chat template ─▶ text ─ its own tokenizer, padded right ─▶ logits (B, 1) ─▶ B rewards

Not promised: a model in a local folder; a model that needs its own code; several GPUs.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from inner.data.hub_data import pin_commit
from inner.data.rendering import as_texts, whole
from inner.errors import InnerError
from inner.models.hub_model import cached_file, fetch_snapshot
from inner.models.naming import HubError
from inner.settings.task import reward_model_parts, reward_name

AT_ONCE = 16  # replies per forward pass
_HEAD = "ForSequenceClassification"
_DEFAULT_LABELS = 2  # transformers' number if config.json names no labels


def pin_reward_model(spelling: str) -> str:
    """Return the spelling with the commit to which its revision (default: main) points.   Raises InnerError."""
    what = f"inner.rewards.functions: {spelling!r}"
    name, revision = reward_model_parts(spelling)
    commit = pin_commit("model", name, revision, what)
    _check_head(_read_config(name, commit, what), what)
    return f"hub:{name}@{commit}"


def load_reward_model(spelling: str) -> Callable[..., list[float]]:
    """Return a reward function on this machine's accelerator; its name is the name in logs.   Raises HubError."""
    name, commit = reward_model_parts(spelling)
    return make_reward(fetch_snapshot(name, commit), reward_name(spelling))


def make_reward(folder: Path, name: str) -> Callable[..., list[float]]:
    """Make a reward function.   folder: holds a sequence classifier with one label, and its tokenizer."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.to(torch.accelerator.current_accelerator(check_available=True) or "cpu").eval()

    @torch.inference_mode()
    def score(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        texts = [_text_of(tokenizer, p, c) for p, c in zip(prompts, completions, strict=True)]
        parts = (texts[at : at + AT_ONCE] for at in range(0, len(texts), AT_ONCE))
        return [value for part in parts for value in _logits(model, tokenizer, part)]

    score.__name__ = name
    return score


def _logits(model: Any, tokenizer: Any, texts: list[str]) -> list[float]:
    batch = tokenizer(text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False)
    return model(**batch.to(model.device)).logits[:, 0].float().tolist()


def _text_of(tokenizer: Any, prompt: Any, completion: Any) -> str:
    if isinstance(prompt, str):
        return prompt + completion
    from trl.data_utils import apply_chat_template

    text = apply_chat_template({"messages": as_texts(prompt + completion)}, tokenizer)["text"]
    return whole(text)  # a tool call's arguments may have half a character


def _read_config(name: str, commit: str, what: str) -> dict[str, Any]:
    try:
        return json.loads(cached_file(name, commit, "config.json").read_text(encoding="utf-8"))
    except (HubError, ValueError, OSError) as error:
        raise InnerError(
            f"{what}: its config.json cannot be read: {error}. Name a model that transformers loads. If it is gated, "
            f"accept its terms at https://huggingface.co/{name}, `hf auth login`, and give other machines the token: "
            "--secret HF_TOKEN."
        ) from error


def _check_head(config: dict[str, Any], what: str) -> None:
    kinds = ", ".join(config.get("architectures") or ["nothing that its config.json names"])
    if _HEAD not in kinds:
        raise InnerError(
            f"{what} is {kinds}, which gives no score. A reward model is a …{_HEAD} with one label; to use a judge "
            'of another kind, call it in a function of your own ("file.py:function").'
        )
    labels = config.get("num_labels") or len(config.get("id2label") or {}) or _DEFAULT_LABELS
    if labels != 1:
        raise InnerError(
            f"{what} distinguishes {labels} classes. Name a model with one label: its logit is the reward."
        )
