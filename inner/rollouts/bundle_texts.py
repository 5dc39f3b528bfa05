"""Read the rollouts of a recorded bundle as messages, without torch.

    bundle (bundle.py) ──▶ prompts, completions, Σ weight · reward ──▶ SampledRollout (sample.py)

Not promised: tokens; they are in the bundle, and their texts here.
"""

import json
from collections.abc import Iterable

import numpy as np
import safetensors.numpy
from safetensors import SafetensorError

from inner.rollouts.sample import RolloutBatch, SampledRollout, secret_masker


def bundle_rollouts(payload: bytes, secrets: Iterable[str] = ()) -> list[SampledRollout]:
    """Return all rollouts of a bundle.   secrets: texts to mask.   Raise ValueError if the bytes are no bundle."""
    try:
        header = json.loads(payload[8 : 8 + int.from_bytes(payload[:8], "little")])
        said = json.loads(header["__metadata__"]["bundle"])
        rewards = safetensors.numpy.load(payload)["rewards"]
        known = np.nansum(rewards * np.asarray(said["weights"], np.float32), axis=1)
        totals = np.where(np.isnan(rewards).all(axis=1), np.nan, known).tolist()
        prompts = [said["prompts"][i] for i in said["prompt_of"]]
        batch, hidden = RolloutBatch(prompts, said["completions"], totals, said["environments"]), secret_masker(secrets)
        return [json.loads(hidden(json.dumps(batch.rollout_at(i)))) for i in range(len(prompts))]
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, SafetensorError, RecursionError) as error:
        raise ValueError(f"not a bundle of rollouts: {type(error).__name__}: {error}") from error
