"""Learning from a chosen and a rejected response to the same prompt.

    DPO    -log σ(β [(π_c - π_r) - (ref_c - ref_r)])      summed log-probs    Rafailov et al., arXiv 2305.18290, eq. (7)
    SimPO  -log σ(β (π̄_c - π̄_r) - γ)                      mean log-probs      Meng et al., arXiv 2405.14734, eq. (6)

γ is absolute here (the SimPO code's knob is γ/β; our 1.0 at β = 2 is its ratio .5). DPO's gradient grows with the
length of the responses, SimPO's does not.

Not promised: that the chosen response gets likelier; only the margin is trained.
"""

import torch.nn.functional as F
from torch import Tensor


def sequence_logprobs(
    logits_B_T_V: Tensor, ids_B_T: Tensor, response_mask_B_T: Tensor, average: bool = False
) -> Tensor:
    """log p(response | prompt), summed (or averaged) over the tokens where the mask is 1 -> (B,).

    The mask marks tokens, the shift is ours: the logits at i predict token i + 1. Token 0 is never predicted."""
    mask = response_mask_B_T[:, 1:].bool()
    counts = mask.sum(-1)
    if bool((counts == 0).any()):
        rows = (counts == 0).nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} have no response token after the first position. Drop them, or mend the mask.")
    logits = logits_B_T_V[:, :-1]
    logits = logits if logits.element_size() >= 4 else logits.float()
    logps = logits.log_softmax(-1).gather(-1, ids_B_T[:, 1:, None])[..., 0]
    total = logps.masked_fill(~mask, 0.0).sum(-1)
    return total / counts if average else total


def dpo_loss(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Mean over pairs; every argument is (B,) summed log-probs. `label_smoothing` ε: the share of flipped labels."""
    _same_shape(policy_chosen, policy_rejected, reference_chosen, reference_rejected)
    z = beta * ((policy_chosen - policy_rejected) - (reference_chosen - reference_rejected))
    # logsigmoid, not log(sigmoid()): the latter is -inf from z = -104 on.
    return (-F.logsigmoid(z) * (1 - label_smoothing) - F.logsigmoid(-z) * label_smoothing).mean()


def simpo_loss(chosen_mean: Tensor, rejected_mean: Tensor, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """Mean over pairs; both arguments are (B,) mean log-probs per token. No reference model."""
    _same_shape(chosen_mean, rejected_mean)
    return -F.logsigmoid(beta * (chosen_mean - rejected_mean) - gamma).mean()


def _same_shape(*logps: Tensor) -> None:
    shapes = {tuple(x.shape) for x in logps}
    if len(shapes) > 1:
        raise ValueError(f"log-probs of different shapes {sorted(shapes)}: one number per pair everywhere.")
