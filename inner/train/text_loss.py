"""Compute the next-token loss on a text, in nats per token. Every call gives the same numbers.

    tokens   ┊─w─┊……┊─w─┊……┊─w─┊        at most MOST windows of `width` + 1 tokens, evenly spaced
    loss     of each window: the mean over its tokens

Not promised: the loss that other programs report for this text; their windows and contexts differ.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

MOST, AT_ONCE = 64, 8  # windows


@torch.inference_mode()
def text_losses(model: nn.Module, tokens: np.ndarray, width: int) -> list[float]:
    """Return one loss per window; [] if the text is shorter than a window.   tokens: ids, (n,)."""
    training = model.training
    model.eval()
    losses = [loss for batch in _batches(tokens, width) for loss in _losses(model, batch)]
    model.train(training)
    return losses


def _batches(tokens: np.ndarray, width: int) -> Iterator[np.ndarray]:
    """Yield ids (B, width + 1), B ≤ AT_ONCE."""
    last = len(tokens) - width - 1
    count = 0 if last < 0 else min(MOST, last // width + 1)
    starts = np.linspace(0, max(0, last), count).astype(int)
    for at in range(0, count, AT_ONCE):
        yield np.stack([tokens[start : start + width + 1] for start in starts[at : at + AT_ONCE]]).astype(np.int64)


def _losses(model: nn.Module, ids: np.ndarray) -> list[float]:
    ids_B_T = torch.from_numpy(ids).to(next(model.parameters()).device)
    logits = model(input_ids=ids_B_T[:, :-1]).logits.float()
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), ids_B_T[:, 1:], reduction="none")
    return losses.mean(dim=1).tolist()
