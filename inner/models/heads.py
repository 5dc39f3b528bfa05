"""Tell from config.json and the names of the weights which head a checkpoint has.  No torch here.

    LlamaForCausalLM, GPT2LMHeadModel                a language head
    LlamaModel, and no file has a head               a base model: its head begins at random     a warning
    LlamaForCausalLM, not tied, and no file has one  its config is wrong: the same               a warning
    LlamaForSequenceClassification, score.weight     a head that writes no text                  InnerError
    BertForMaskedLM                                  reads the tokens that it should write       InnerError

Not promised: that a head with an unusual name is recognised.
"""

import re
from collections.abc import Collection
from typing import Any

from inner.errors import InnerError

OTHER_CLASS = re.compile(r"For(?=[A-Z])(?!\w*(LM|Generation|PreTraining))|ForMasked|Reward")
OTHER_WEIGHTS = ("score", "classifier", "qa_outputs", "reward_head")  # what a weight's name begins with
LANGUAGE = re.compile(r"(^|\.)(lm_head|embed_out)\.|^output\.")  # in the names of a language head's weights
DRAWN = (
    "no file has the language head of {} (it is a base model, or config.json wrongly has tie_word_embeddings = false), "
    "so the head begins with random values, and the first answers are random. If that is not intended, correct the "
    "config, or set inner.model to a checkpoint with its head (…ForCausalLM)"
)


def check_head(config: Any, names: Collection[str], source: str) -> str:
    """Return a warning about a head that is in no file, or "".   Raises InnerError for a head that writes no text.

    config: the contents of config.json.   names: the names of all weights; empty if unknown."""
    config = config if isinstance(config, dict) else {}
    classes = config.get("architectures") or []
    untied = config.get("tie_word_embeddings") is False
    drawn = bool(names) and untied and not any(LANGUAGE.search(name) for name in names)
    refuse_other_head(classes, names if drawn else (), source)
    is_base = bool(classes) and all(name.endswith("Model") and "Head" not in name for name in classes)
    is_usual = any(name.endswith("embed_tokens.weight") for name in names)  # beside it, a head is called lm_head
    return f"warning: {DRAWN.format(source)}" if drawn and (is_base or is_usual) else ""


def refuse_other_head(classes: Collection[str], names: Collection[str], source: str) -> None:
    """Raise InnerError for a checkpoint whose head writes no text.   names: weights beside a randomly drawn head."""
    seen = [f"config.json names {name}" for name in classes if OTHER_CLASS.search(name)]
    seen += [f"the files have {name}" for name in sorted(names) if name.partition(".")[0] in OTHER_WEIGHTS]
    if seen:
        raise InnerError(
            f"the model {source} has a head that writes no text ({' and '.join(seen[:2])}), and a run would train it "
            "with another head. Set inner.model to the language model that it was made from (…ForCausalLM). A "
            'sequence classifier on the Hub can be a reward: [inner.rewards.functions] "hub:OWNER/NAME" = 1.0'
        )
