"""Compute the three-channel loss in one function: to check wiring and gradients on any causal LM.

    total = lm_ce + α · sdpo_jsd + β · trace_replay_dpo

    lm_ce              cross-entropy of the response tokens             always
    sdpo_jsd           student vs the same model under a hint           if α > 0 and batch has ctx_teacher_input_ids
    trace_replay_dpo   DPO or SimPO on (chosen, rejected)               if β > 0 and batch has the dpo_* keys

A channel that is off costs no forward, and its term is 0. The first two terms share one student forward. The trainer
uses the same kernels.

Pairing: masks mark tokens; this file does the causal shift. The k-th marked token of the student is compared with the
k-th marked token of the teacher. Positions differ, because a hint makes the teacher's row longer.

Not promised: rewards. ComposerReplicationTrainer trains with rewards; this file only calls the same kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from inner.channels.terms import distillation_loss, preference_loss
from inner.losses.divergence import zero_on_graph
from inner.losses.preference import sequence_logprobs
from inner.settings.channels import ChannelSettings
from inner.settings.keywords import channels_from_keywords

Batch = Mapping[str, Tensor]


@dataclass(frozen=True)
class LossParts:
    """Scalars that carry gradients. The term of a channel that is off is a constant 0."""

    total: Tensor
    lm_ce: Tensor
    sdpo_jsd: Tensor
    trace_replay_dpo: Tensor


def compose_loss(
    model: nn.Module,
    batch: Batch,
    alpha_sdpo: float = 0.0,
    beta_replay: float = 0.0,
    sdpo_jsd_beta: float = 0.5,
    sdpo_temperature: float = 1.0,
    sdpo_token_clip: float | None = None,
    replay_dpo_beta: float = 0.1,
    dpo_variant: Literal["dpo", "simpo"] = "dpo",
    simpo_beta: float = 2.0,
    simpo_gamma: float = 1.0,
    sdpo_wrapper: Literal["none", "taid", "entropy_opd", "eopd"] = "none",
    taid_t: float | None = None,
    entropy_opd_h_max: float | None = None,
    eopd_threshold: float | None = None,
    teacher: nn.Module | None = None,
    **anchors: float,
) -> LossParts:
    """Compute the loss. Forwards: one of the student; with SDPO one of the teacher, without gradient; two for pairs.

    Keys (those in [] are optional): input_ids, [attention_mask], [response_mask]; ctx_teacher_input_ids,
    [ctx_teacher_attention_mask], [sdpo_loss_mask: default the response], [ctx_teacher_loss_mask: by default the rows
    are aligned at their ends, so student and teacher need the same padding on the right];
    dpo_{chosen,rejected}_{input_ids, response_mask, [attention_mask], ref_logprobs (dpo only)}.

    teacher: a model with the same vocabulary; default: the student.   anchors: replay_label_smoothing,
    replay_nll_weight, replay_dpop_lambda.   Raises ValueError for settings that cannot work."""
    if sdpo_wrapper == "taid" and (taid_t is None or not 0 <= taid_t <= 1):
        raise ValueError(f'sdpo_wrapper = "taid" needs taid_t in [0, 1], got {taid_t}. Pass taid_t=scheduler.t.')
    settings = channels_from_keywords(
        alpha_sdpo=alpha_sdpo,
        beta_replay=beta_replay,
        sdpo_jsd_beta=sdpo_jsd_beta,
        sdpo_temperature=sdpo_temperature,
        sdpo_token_clip=sdpo_token_clip,
        replay_dpo_beta=replay_dpo_beta,
        dpo_variant=dpo_variant,
        simpo_beta=simpo_beta,
        simpo_gamma=simpo_gamma,
        sdpo_wrapper=sdpo_wrapper,
        schedule_steps=1 if sdpo_wrapper == "taid" else None,  # required, but unused: the caller passes taid_t
        entropy_opd_h_max=entropy_opd_h_max,
        eopd_threshold=eopd_threshold,
        **anchors,  # pyright: ignore[reportArgumentType]
    )
    logits = _model_logits(model, batch, "")
    lm_ce = _response_ce(logits, batch)
    sdpo = logits.new_zeros(())
    replay = logits.new_zeros(())
    if alpha_sdpo > 0 and _has_tensor(batch, "ctx_teacher_input_ids"):
        sdpo = _sdpo_term(teacher or model, logits, batch, settings, taid_t or 0.0)
    if beta_replay > 0 and all(_has_tensor(batch, f"dpo_{side}_input_ids") for side in _SIDES):
        replay = _replay_term(model, batch, settings)
    return LossParts(lm_ce + alpha_sdpo * sdpo + beta_replay * replay, lm_ce, sdpo, replay)


_SIDES = ("chosen", "rejected")


def _sdpo_term(teacher: nn.Module, logits: Tensor, batch: Batch, settings: ChannelSettings, taid_t: float) -> Tensor:
    """Return the distillation loss, a mean over the marked tokens."""
    student_N_V, teacher_N_V = _paired_logits(teacher, logits, batch)
    if student_N_V.numel() == 0:
        return zero_on_graph(logits)
    return distillation_loss(student_N_V, teacher_N_V, settings, taid_t) / student_N_V.size(0)


def _replay_term(model: nn.Module, batch: Batch, settings: ChannelSettings) -> Tensor:
    sums_2P = torch.cat([_response_logps(model, batch, side) for side in _SIDES])
    tokens_2P = torch.cat([batch[f"dpo_{side}_response_mask"][:, 1:].sum(-1) for side in _SIDES])
    reference = None
    if settings.replay.variant == "dpo":
        reference = torch.stack([_reference_logprobs(batch, side) for side in _SIDES], dim=1)
    loss, _ = preference_loss(sums_2P, tokens_2P, reference, torch.ones_like(sums_2P.chunk(2)[0]), settings)
    return loss


def _reference_logprobs(batch: Batch, side: str) -> Tensor:
    key = f"dpo_{side}_ref_logprobs"
    if key not in batch:
        raise KeyError(f'dpo_variant = "dpo" needs {key}: log p of each response under the reference. Or use "simpo".')
    return batch[key]


def _has_tensor(inputs: Batch, key: str) -> bool:
    return key in inputs and inputs[key].numel() > 0


def _model_logits(model: nn.Module, inputs: Batch, prefix: str) -> Tensor:
    """Return logits (B, T, V) of inputs[prefix + "input_ids"]. Padding is masked if there is an attention mask."""
    return model(input_ids=inputs[f"{prefix}input_ids"], attention_mask=inputs.get(f"{prefix}attention_mask")).logits


def _response_ce(logits: Tensor, inputs: Batch) -> Tensor:
    """Return the mean cross-entropy of the response tokens; without response_mask: of all tokens but padding."""
    targets = inputs["input_ids"].masked_fill(_response_mask(inputs) == 0, -100)[:, 1:]
    if not bool((targets != -100).any()):
        return zero_on_graph(logits)
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten())


def _response_mask(inputs: Batch) -> Tensor:
    return inputs.get("response_mask", inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])))


def _paired_logits(teacher: nn.Module, logits: Tensor, inputs: Batch) -> tuple[Tensor, Tensor]:
    """Return student's and teacher's logits, (N, V) each: the k-th marked token of a row is paired with the k-th."""
    student_mask = inputs.get("sdpo_loss_mask", _response_mask(inputs)).bool()
    teacher_mask = _teacher_mask(student_mask, inputs)
    if not torch.equal(student_mask[:, 1:].sum(-1), teacher_mask[:, 1:].sum(-1)):
        raise ValueError(
            f"sdpo_loss_mask marks {student_mask[:, 1:].sum(-1).tolist()} tokens per row and ctx_teacher_loss_mask "
            f"{teacher_mask[:, 1:].sum(-1).tolist()}. Mark the same tokens in both."
        )
    with torch.no_grad():
        teacher_logits = _model_logits(teacher, inputs, "ctx_teacher_")
    if teacher_logits.size(-1) != logits.size(-1):
        raise ValueError(
            f"the student's vocabulary has {logits.size(-1)} tokens and the teacher's {teacher_logits.size(-1)}, so "
            "their distributions cannot be compared. Use a teacher with the student's tokenizer."
        )
    _check_same_tokens(student_mask, teacher_mask, inputs)
    # The logits at i predict token i + 1, so a mask over tokens is shifted left by one.
    return logits[:, :-1][student_mask[:, 1:]], teacher_logits[:, :-1][teacher_mask[:, 1:]]


def _check_same_tokens(student_mask: Tensor, teacher_mask: Tensor, inputs: Batch) -> None:
    """Raise ValueError unless both rows mark the same tokens: else the loss would compare different tokens."""
    own = inputs["input_ids"][:, 1:]
    hinted = inputs["ctx_teacher_input_ids"][:, 1:]
    if torch.equal(own[student_mask[:, 1:]], hinted[teacher_mask[:, 1:]]):
        return
    differ = [
        row
        for row in range(own.size(0))
        if not torch.equal(own[row, student_mask[row, 1:]], hinted[row, teacher_mask[row, 1:]])
    ]
    raise ValueError(
        f"the marked tokens of rows {differ[:8]} are not the same in input_ids and ctx_teacher_input_ids. Rows of "
        "different lengths that are padded on the right cannot be aligned at their end: pass ctx_teacher_loss_mask "
        "(span_batch makes it), or pad on the left."
    )


def _teacher_mask(student_mask: Tensor, inputs: Batch) -> Tensor:
    """Return ctx_teacher_loss_mask; without it, the student's mask shifted right by the difference in length. This is
    correct only if student and teacher have the same padding on the right."""
    if "ctx_teacher_loss_mask" in inputs:
        return inputs["ctx_teacher_loss_mask"].bool()
    longer = inputs["ctx_teacher_input_ids"].size(1) - student_mask.size(1)
    if longer < 0:
        raise ValueError(
            f"ctx_teacher_input_ids are {-longer} tokens shorter than input_ids, but a hint makes them longer. "
            "Pass ctx_teacher_loss_mask: it says which tokens belong together."
        )
    return nn.functional.pad(student_mask, (longer, 0))


def _response_logps(model: nn.Module, batch: Batch, side: str) -> Tensor:
    logits = _model_logits(model, batch, f"dpo_{side}_")
    return sequence_logprobs(logits, batch[f"dpo_{side}_input_ids"], batch[f"dpo_{side}_response_mask"])


# A small batch to try compose_loss with


def build_batch(tokenizer: PreTrainedTokenizerBase, device: str = "cpu", hint: str | None = None) -> dict[str, Tensor]:
    """Make a batch of one question with an answer and one (chosen, rejected) pair, in a chat template if there is one.

    A `hint` adds the SDPO keys. The reference log-probs are placeholders of 0, not a reference model's."""
    question = "What is 2 + 2?"
    answer = "2 + 2 = 4."
    ids, mask = _encode(tokenizer, question, answer, device)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "response_mask": mask}
    for side, text in (("chosen", "4"), ("rejected", "I do not know.")):
        pair_ids, pair_mask = _encode(tokenizer, question, text, device)
        batch[f"dpo_{side}_input_ids"] = pair_ids
        batch[f"dpo_{side}_response_mask"] = pair_mask
        batch[f"dpo_{side}_ref_logprobs"] = torch.zeros(1, device=device)
    if hint is not None:
        hinted_ids, hinted_mask = _encode(tokenizer, f"{question} {hint}", answer, device)
        batch |= {"ctx_teacher_input_ids": hinted_ids, "ctx_teacher_loss_mask": hinted_mask, "sdpo_loss_mask": mask}
    return batch


def _encode(tokenizer: Any, question: str, answer: str, device: str) -> tuple[Tensor, Tensor]:
    """Join prompt, answer and eos; return ids (1, T) and the 0/1 mask of answer and eos."""
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
