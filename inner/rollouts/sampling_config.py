"""Sampling is what run.toml says, and nothing else: not in rollouts, not in [eval].

    start model's generation_config.json    num_beams 4, min_new_tokens 8, epsilon_cutoff .01, eos [2, 7], …
                                            └ dropped ───────────────────────────────────┘   └ kept: eos, pad, bos

`generate` fills each field that it was not given from the model's own config, so a field that TRL leaves out would be
the model's.  The files of the model, and an export, keep theirs: engines read them.

Not promised: vLLM, which takes its stop tokens alone from there.
"""

from typing import Any

from transformers import GenerationConfig

from inner.models.causal_lm import causal_lm


def sample_as_asked(model: Any) -> None:
    """Leave the model's special tokens of its generation config, and nothing else."""
    inner = causal_lm(model)
    own = inner.generation_config
    inner.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
