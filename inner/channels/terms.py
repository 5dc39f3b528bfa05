"""Compute the two loss terms beside the policy loss (sdpo, replay) from a forward's output.

    states_B_T_D ── the positions that count ──▶ head ──▶ logits_N_V ──▶ kernel ──▶ scalar on the graph

    sdpo     hint      Σ over the turns' tokens of D(student ‖ teacher) / rollouts      D: JSD, TAID or the entropy gate
             rollout   the SDPO paper's loss: mean over the tokens that the model wrote, of the whole inner step
    replay   DPO or SimPO, mean over pairs of weight · loss

    gradient norm of a channel: ‖∂(its share of the total) / ∂ states‖ at the backbone's output. We measure it in the
    one backward pass (at the cost of one norm of (B, T, D) per channel and micro-batch). So this norm is not the
    norm over the parameters. Compare channels by this norm, not runs.

Only positions that count go through the LM head. Logits are scaled and soft-capped as in the model's own forward.

Not promised: vocabularies that are split over devices, or models that change logits in other ways.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from inner.losses.chunks import by_position
from inner.losses.divergence import IGNORE, generalized_jsd_loss
from inner.losses.opd import entropy_aware_opd_loss, eopd_loss
from inner.losses.preference import dpo_loss, simpo_loss, token_logprobs
from inner.losses.sdpo import sdpo_loss
from inner.losses.taid import taid_loss
from inner.models.causal_lm import causal_lm
from inner.settings.channels import ChannelSettings

Turns = Sequence[tuple[int, int, int]]  # (row, first position, number of positions)


# States and logits


def backbone_states(model: Any, ids_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """Return the input of the LM head, (B, T, D)."""
    return causal_lm(model).base_model(input_ids=ids_B_T, attention_mask=mask_B_T, use_cache=False).last_hidden_state


def logits_at(model: Any, states_B_T_D: Tensor, turns: Turns) -> Tensor:
    """Return the logits (N, V) at the turns' positions, in the order of `turns`."""
    rows = [row for row, _, n in turns for _ in range(n)]
    positions = [i for _, first, n in turns for i in range(first, first + n)]
    device = states_B_T_D.device
    picked = states_B_T_D[torch.tensor(rows, device=device), torch.tensor(positions, device=device)]
    return scale_logits_as_model(causal_lm(model), causal_lm(model).get_output_embeddings()(picked))


def scale_logits_as_model(model: Any, logits: Tensor) -> Tensor:
    """Scale and soft-cap the LM head's output as Cohere, Granite, Falcon-H1, Gemma 2 and others do in their forward."""
    config = model.config.get_text_config()
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (scale := getattr(config, name, None)) is not None:
            logits = logits * scale
            break
    else:
        if (factor := getattr(config, "logits_scaling", None)) is not None:  # HyperCLOVA X multiplies, Granite divides
            logits = logits * factor if config.model_type == "hyperclovax" else logits / factor
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def pad_rows(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids and attention mask (B, T), padded on the right with id 0, which the mask hides."""
    width = max(len(row) for row in rows)
    ids_B_T = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=device)
    mask_B_T = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=device)
    return ids_B_T, mask_B_T


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Turn off dropout and checkpointing during a `with`."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def tap_gradient_norm(states: Tensor, note: Callable[[float], None]) -> Tensor:
    """Return the same states as a new tensor. When a gradient flows back through it, `note` gets its norm."""
    edge = states.view_as(states)
    if edge.requires_grad:

        def measure(gradient: Tensor) -> None:
            note(gradient.float().norm().item())

        edge.register_hook(measure)
    return edge


# SDPO


def distillation_loss(student_N_V: Tensor, teacher_N_V: Tensor, settings: ChannelSettings, taid_t: float) -> Tensor:
    """Return the divergence, summed over N tokens."""
    if settings.sdpo.wrapper == "none":
        return generalized_jsd_loss(
            student_N_V,
            teacher_N_V,
            beta=settings.sdpo.jsd_beta,
            temperature=settings.sdpo.temperature,
            reduction="sum",
            token_clip=settings.sdpo.token_clip,
        )
    n = student_N_V.size(0)
    everywhere = torch.ones(n, device=student_N_V.device)
    student = student_N_V / settings.sdpo.temperature
    teacher = teacher_N_V / settings.sdpo.temperature
    if settings.sdpo.wrapper == "taid":
        return n * taid_loss(student, teacher, everywhere, taid_t)
    if settings.sdpo.wrapper == "eopd" and settings.sdpo.eopd_threshold is not None:
        return n * eopd_loss(student, teacher, everywhere, settings.sdpo.eopd_threshold)
    return n * entropy_aware_opd_loss(student, teacher, everywhere, settings.sdpo.entropy_opd_h_max)


def self_distillation_loss(
    student_N_V: Tensor,
    teacher_N_V: Tensor,
    ids_N: Tensor,
    written_N: Tensor,
    old_N: Tensor | None,
    settings: ChannelSettings,
    tokens: float | None = None,
    sampling_temperature: float = 1.0,
) -> Tensor:
    """Return the SDPO paper's loss over whole responses: Σ over tokens the model wrote / `tokens` (None: N of them).

    sampling_temperature: the temperature of `old_N`."""
    return sdpo_loss(
        student_N_V,
        teacher_N_V,
        ids_N.masked_fill(written_N == 0, IGNORE),
        old_logprobs=old_N,
        alpha=settings.sdpo.jsd_beta,
        top_k=settings.sdpo.top_k,
        temperature=settings.sdpo.temperature,
        divisor=tokens,
        sampling_temperature=sampling_temperature,
    )


# Replay


def response_logprobs(model: Any, states_B_T_D: Tensor, prompts: Sequence[int], rows: Sequence[list[int]]) -> Tensor:
    """Return log p(row[prompt:] | row[:prompt]) of each row, summed over the response: (B,)."""
    lengths = [len(row) - prompt for row, prompt in zip(rows, prompts, strict=True)]
    turns = [(i, prompt - 1, n) for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))]
    logits_N_V = logits_at(model, states_B_T_D, turns)
    device = logits_N_V.device
    response_ids = torch.tensor([i for row, n in zip(rows, lengths, strict=True) for i in row[-n:]], device=device)
    row_of = torch.tensor([i for i, n in enumerate(lengths) for _ in range(n)], device=device)
    everywhere = torch.ones(len(response_ids), dtype=torch.bool, device=device)
    logps_N = by_position(token_logprobs, logits_N_V, response_ids[:, None], everywhere)
    return torch.zeros(len(rows), dtype=logps_N.dtype, device=device).index_add(0, row_of, logps_N)


def preference_loss(
    policy_2P: Tensor, tokens_2P: Tensor, reference_P_2: Tensor | None, weights_P: Tensor, settings: ChannelSettings
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss on P pairs (all chosen responses first), and its metrics."""
    chosen, rejected = policy_2P.chunk(2)
    if settings.replay.variant == "simpo":
        chosen_mean, rejected_mean = (policy_2P / tokens_2P).chunk(2)
        loss = simpo_loss(
            chosen_mean, rejected_mean, settings.replay.simpo_beta, settings.replay.simpo_gamma, weights_P
        )
        margin = chosen_mean - rejected_mean
    else:
        assert reference_P_2 is not None, "DPO needs log-probs of a reference"
        start_chosen, start_rejected = reference_P_2.to(policy_2P).unbind(1)
        margin = (chosen - start_chosen) - (rejected - start_rejected)
        loss = dpo_loss(
            chosen,
            rejected,
            start_chosen,
            start_rejected,
            beta=settings.replay.dpo_beta,
            label_smoothing=settings.replay.label_smoothing,
            nll_weight=settings.replay.nll_weight,
            chosen_tokens=tokens_2P.chunk(2)[0],
            dpop_lambda=settings.replay.dpop_lambda,
            weights=weights_P,
        )
    metrics = {"accuracy": (margin > 0).float().mean(), "margin": margin.mean(), "chosen_logp": chosen.mean()}
    return loss, {name: value.item() for name, value in metrics.items()}
