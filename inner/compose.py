"""The three-channel loss as one free function, for wiring checks and gradient-flow tests on any causal LM.

    total = lm_ce + α · sdpo_jsd + β · trace_replay_dpo

    lm_ce              cross-entropy of the response tokens             always
    sdpo_jsd           student vs the same model under a hint           α > 0 and ctx_teacher_input_ids is there
    trace_replay_dpo   DPO or SimPO on (chosen, rejected)               β > 0 and the dpo_* keys are there

A channel that is off costs no forward and is 0. The student runs once for the first two.

Pairing: masks mark tokens, the causal shift is done here. The k-th marked token of the student is compared with the
k-th marked token of the teacher, by index, since a hint makes the teacher's row longer.

Not promised: rewards. The trainer with rewards is ComposerReplicationTrainer; this is the harness around the same
kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from inner.losses.divergence import generalized_jsd_loss, zero_on_graph
from inner.losses.opd import entropy_aware_opd_loss
from inner.losses.preference import dpo_loss, sequence_logprobs, simpo_loss
from inner.losses.taid import taid_loss

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LossParts:
    """Scalars with their graph; a channel that is off is a plain 0."""

    total: Tensor
    lm_ce: Tensor
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor


def compose_loss(
    model: nn.Module,
    inputs: Batch,
    alpha_sdpo: float = 0.0,
    beta_replay: float = 0.0,
    sdpo_jsd_beta: float = 0.5,
    sdpo_temperature: float = 1.0,
    sdpo_token_clip: float | None = None,
    replay_dpo_beta: float = 0.1,
    dpo_variant: Literal["dpo", "simpo"] = "dpo",
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    sdpo_wrapper: Literal["none", "taid", "entropy_opd"] = "none",
    taid_t: float | None = None,
    entropy_opd_h_max: float | None = None,
) -> LossParts:
    """One student forward (+ one teacher forward without gradient, + two for the pairs, where those channels are on).

    Keys: input_ids, [attention_mask], [response_mask]; ctx_teacher_input_ids, [ctx_teacher_attention_mask],
    sdpo_loss_mask, [ctx_teacher_loss_mask: without it the teacher's row is aligned at its end];
    dpo_{chosen,rejected}_{input_ids, response_mask, [attention_mask], ref_logprobs (dpo only)}."""
    _check_choices(alpha_sdpo, beta_replay, dpo_variant, sdpo_wrapper, taid_t)
    logits = _logits(model, inputs, "")
    lm_ce = _response_ce(logits, inputs)
    sdpo, replay = logits.new_zeros(()), logits.new_zeros(())
    if alpha_sdpo > 0 and _there(inputs, "ctx_teacher_input_ids"):
        student, teacher = _paired_logits(model, logits, inputs)
        if student.numel() == 0:
            sdpo = zero_on_graph(logits)
        elif sdpo_wrapper == "taid":
            sdpo = taid_loss(student, teacher, _all(student), float(taid_t or 0.0))
        elif sdpo_wrapper == "entropy_opd":
            sdpo = entropy_aware_opd_loss(student, teacher, _all(student), entropy_opd_h_max)
        else:
            sdpo = generalized_jsd_loss(
                student,
                teacher,
                beta=sdpo_jsd_beta,
                temperature=sdpo_temperature,
                token_clip=sdpo_token_clip,
            )
    if beta_replay > 0 and _there(inputs, "dpo_chosen_input_ids"):
        if dpo_variant == "simpo":
            chosen, rejected = (_response_logps(model, inputs, side, average=True) for side in _SIDES)
            replay = simpo_loss(chosen, rejected, simpo_beta, simpo_gamma)
        else:
            chosen, rejected = (_response_logps(model, inputs, side) for side in _SIDES)
            reference = (inputs[f"dpo_{side}_ref_logprobs"] for side in _SIDES)
            replay = dpo_loss(chosen, rejected, *reference, beta=replay_dpo_beta)
    return LossParts(lm_ce + alpha_sdpo * sdpo + beta_replay * replay, lm_ce, sdpo, replay)


_SIDES = ("chosen", "rejected")


def _check_choices(alpha: float, beta: float, variant: str, wrapper: str, taid_t: float | None) -> None:
    if alpha < 0 or beta < 0:
        raise ValueError(f"alpha_sdpo = {alpha} and beta_replay = {beta} must be 0 (off) or more.")
    if variant not in ("dpo", "simpo"):
        raise ValueError(f"dpo_variant = {variant!r} is not known. One of: dpo, simpo.")
    if wrapper not in ("none", "taid", "entropy_opd"):
        raise ValueError(f"sdpo_wrapper = {wrapper!r} is not known. One of: none, taid, entropy_opd.")
    if wrapper == "taid" and (taid_t is None or not 0 <= taid_t <= 1):
        raise ValueError(f'sdpo_wrapper = "taid" needs taid_t in [0, 1], got {taid_t}. Pass taid_t=scheduler.t.')


def _there(inputs: Batch, key: str) -> bool:
    return key in inputs and inputs[key].numel() > 0


def _all(logits_N_V: Tensor) -> Tensor:
    return torch.ones(logits_N_V.shape[:-1], device=logits_N_V.device)


def _logits(model: nn.Module, inputs: Batch, prefix: str) -> Tensor:
    """Logits (B, T, V) of inputs[prefix + "input_ids"], padding masked where the batch says what padding is."""
    return model(input_ids=inputs[f"{prefix}input_ids"], attention_mask=inputs.get(f"{prefix}attention_mask")).logits


def _response_ce(logits: Tensor, inputs: Batch) -> Tensor:
    """Mean over the response tokens; without a response_mask: over all tokens that are not padding."""
    ids_B_T = inputs["input_ids"]
    mask = inputs.get("response_mask", inputs.get("attention_mask", torch.ones_like(ids_B_T)))
    targets = ids_B_T.masked_fill(mask == 0, -100)[:, 1:]
    if not bool((targets != -100).any()):
        return zero_on_graph(logits)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())


def _paired_logits(model: nn.Module, logits: Tensor, inputs: Batch) -> tuple[Tensor, Tensor]:
    """(N, V) twice: what student and teacher predict for the k-th marked token of each row."""
    student_mask = inputs["sdpo_loss_mask"].bool()
    teacher_mask = _teacher_mask(student_mask, inputs)
    if not torch.equal(student_mask[:, 1:].sum(-1), teacher_mask[:, 1:].sum(-1)):
        raise ValueError(
            f"sdpo_loss_mask marks {student_mask[:, 1:].sum(-1).tolist()} tokens per row and ctx_teacher_loss_mask "
            f"{teacher_mask[:, 1:].sum(-1).tolist()}. Mark the same tokens in both."
        )
    with torch.no_grad():
        teacher_logits = _logits(model, inputs, "ctx_teacher_")
    # The logits at i predict token i + 1, so a mask over tokens is read from its second column on.
    return logits[:, :-1][student_mask[:, 1:]], teacher_logits[:, :-1][teacher_mask[:, 1:]]


def _teacher_mask(student_mask: Tensor, inputs: Batch) -> Tensor:
    """The teacher's own mask, or the student's moved right by as much as the teacher's row is longer."""
    if "ctx_teacher_loss_mask" in inputs:
        return inputs["ctx_teacher_loss_mask"].bool()
    longer = inputs["ctx_teacher_input_ids"].size(1) - student_mask.size(1)
    if longer < 0:
        raise ValueError(
            f"ctx_teacher_input_ids are {-longer} tokens shorter than input_ids; a hint makes them longer. Pass "
            "ctx_teacher_loss_mask to say which tokens belong together."
        )
    return nn.functional.pad(student_mask, (longer, 0))


def _response_logps(model: nn.Module, inputs: Batch, side: str, average: bool = False) -> Tensor:
    logits = _logits(model, inputs, f"dpo_{side}_")
    return sequence_logprobs(logits, inputs[f"dpo_{side}_input_ids"], inputs[f"dpo_{side}_response_mask"], average)


# A batch with text in it, for a first look


def build_batch(tokenizer: PreTrainedTokenizerBase, device: str = "cpu", hint: str | None = None) -> dict[str, Tensor]:
    """One question with an answer, and one (chosen, rejected) pair, in the tokenizer's chat template where it has one.

    With a `hint` the SDPO keys are there too. The reference log-probs are 0: a starting point, not a reference
    model."""
    question, answer = "What is 2 + 2?", "2 + 2 = 4."
    ids, mask = _encode(tokenizer, question, answer, device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    for side, text in (("chosen", "4"), ("rejected", "I do not know.")):
        pair_ids, pair_mask = _encode(tokenizer, question, text, device)
        batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"] = pair_ids, pair_mask
        batch[f"dpo_{side}_ref_logprobs"] = torch.zeros(1, device=device)
    if hint is not None:
        hinted_ids, hinted_mask = _encode(tokenizer, f"{question} {hint}", answer, device)
        batch |= {
            "ctx_teacher_input_ids": hinted_ids,
            "ctx_teacher_loss_mask": hinted_mask,
            "sdpo_loss_mask": mask,
        }
    return batch


def _encode(tokenizer: Any, question: str, answer: str, device: str) -> tuple[Tensor, Tensor]:
    """prompt + answer + end -> ids (1, T) and the 0/1 mask of the answer's tokens."""
    if getattr(tokenizer, "chat_template", None):
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
    else:
        prompt = tokenizer(question, add_special_tokens=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    response = tokenizer(answer, add_special_tokens=False)["input_ids"] + end
    ids = torch.tensor([prompt + response], device=device)
    mask = torch.tensor([[0] * len(prompt) + [1] * len(response)], device=device)
    return ids, mask
