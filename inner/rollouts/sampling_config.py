"""Sample only as run.toml says, both in rollouts and in [eval].

    start model's generation_config.json    num_beams 4, min_new_tokens 8, epsilon_cutoff .01, eos [2, 7], …
                                            └ dropped ───────────────────────────────────┘   └ kept: eos, pad, bos

`generate` fills each missing field from the model's generation config. So a field that TRL does not set would have the
model's value. The model's files, and an export, keep their config, because engines read it.

Not promised: the same for vLLM, which reads only stop tokens from that config.
"""

from typing import Any

from transformers import GenerationConfig

from inner.models.causal_lm import causal_lm


def sample_as_asked(model: Any) -> None:
    """Remove all from the model's generation config except its special tokens."""
    inner = causal_lm(model)
    own = inner.generation_config
    inner.generation_config = GenerationConfig(
        bos_token_id=own.bos_token_id, eos_token_id=own.eos_token_id, pad_token_id=own.pad_token_id
    )
