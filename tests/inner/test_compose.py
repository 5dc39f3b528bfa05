"""compose_loss: channels on and off, the causal shift, the pairing by index, and the quickstart batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from inner.losses.divergence import generalized_jsd_loss
from inner.train.compose import build_batch, compose_loss
from inner.worlds.tiny import tiny_model, tiny_tokenizer
from inner.worlds.toolworld import ToolWorld

HINT = "Think of pairs."


@pytest.fixture
def model() -> nn.Module:
    return tiny_model(64, seed=1)


def batch(hint: str | None = HINT) -> dict[str, Tensor]:
    return build_batch(tiny_tokenizer(), hint=hint)


def count_forwards(model: nn.Module) -> list[bool]:
    """One entry per forward: whether it ran with gradients."""
    seen: list[bool] = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    return seen


def test_total_is_the_weighted_sum(model: nn.Module) -> None:
    parts = compose_loss(model, batch(), alpha_sdpo=0.3, beta_replay=0.2)
    assert parts.sdpo_jsd > 0 and parts.trace_replay_dpo > 0
    expected = parts.lm_ce + 0.3 * parts.sdpo_jsd + 0.2 * parts.trace_replay_dpo
    torch.testing.assert_close(parts.total, expected)


def test_each_weight_reaches_the_gradient(model: nn.Module) -> None:
    def gradient(**weights: float) -> Tensor:
        parts = compose_loss(model, batch(), **weights)  # type: ignore[arg-type]
        return torch.cat([g.flatten() for g in torch.autograd.grad(parts.total, list(model.parameters()))])

    base = gradient()
    for name in ("alpha_sdpo", "beta_replay"):
        once, twice = gradient(**{name: 0.5}) - base, gradient(**{name: 1.0}) - base
        assert once.abs().max() > 1e-5
        torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-6)


def test_off_channels_run_no_forward(model: nn.Module) -> None:
    seen = count_forwards(model)
    compose_loss(model, batch())
    assert seen == [True]
    seen.clear()
    compose_loss(model, batch(), alpha_sdpo=0.1)
    assert seen == [True, False]  # the teacher, without gradient; the student runs once
    seen.clear()
    parts = compose_loss(model, batch(hint=None), alpha_sdpo=0.1)  # the weight is there, the keys are not
    assert seen == [True] and parts.sdpo_jsd == 0
    seen.clear()
    compose_loss(model, batch(), beta_replay=0.1)
    assert seen == [True, True, True]


def test_lm_ce_is_shifted_and_only_the_response(model: nn.Module) -> None:
    inputs = batch()
    logp = model(input_ids=inputs["input_ids"]).logits.log_softmax(-1)
    at = inputs["response_mask"][0].nonzero().flatten()
    expected = -logp[0, at - 1, inputs["input_ids"][0, at]].mean()
    torch.testing.assert_close(compose_loss(model, inputs).lm_ce, expected)


def test_sdpo_pairs_the_kth_token_of_both_rows(model: nn.Module) -> None:
    inputs = batch()
    own, hinted = inputs["input_ids"], inputs["ctx_teacher_input_ids"]
    assert hinted.size(1) > own.size(1)
    n = int(inputs["sdpo_loss_mask"].sum())
    torch.testing.assert_close(own[:, -n:], hinted[:, -n:])
    student = model(input_ids=own).logits[0, -n - 1 : -1]
    teacher = model(input_ids=hinted).logits[0, -n - 1 : -1].detach()
    expected = generalized_jsd_loss(student, teacher)
    torch.testing.assert_close(compose_loss(model, inputs, alpha_sdpo=1.0).sdpo_jsd, expected)
    del inputs["ctx_teacher_loss_mask"]  # then the teacher's row is aligned at its end
    torch.testing.assert_close(compose_loss(model, inputs, alpha_sdpo=1.0).sdpo_jsd, expected)


def test_a_mask_that_marks_other_tokens_is_refused(model: nn.Module) -> None:
    inputs = batch()
    inputs["ctx_teacher_loss_mask"] = torch.ones_like(inputs["ctx_teacher_input_ids"])
    with pytest.raises(ValueError, match="Mark the same tokens"):
        compose_loss(model, inputs, alpha_sdpo=0.1)


def two_rows(right: bool) -> dict[str, Tensor]:
    """Two answers; the hints have different lengths, so the shorter rows are padded, on the right or on the left."""
    rows = [batch("Think."), batch("Think of pairs, then of fours.")]

    def joined(key: str, fill: int) -> Tensor:
        width = max(row[key].size(1) for row in rows)
        gaps = [width - row[key].size(1) for row in rows]
        sides = [(0, gap) if right else (gap, 0) for gap in gaps]
        return torch.cat([nn.functional.pad(r[key], side, value=fill) for r, side in zip(rows, sides, strict=True)])

    for row in rows:
        row["ctx_teacher_attention_mask"] = torch.ones_like(row["ctx_teacher_input_ids"])
    keys = ("input_ids", "attention_mask", "response_mask", "sdpo_loss_mask")
    teacher = ("ctx_teacher_input_ids", "ctx_teacher_attention_mask", "ctx_teacher_loss_mask")
    return {key: joined(key, 256 if key.endswith("ids") else 0) for key in keys + teacher}


@pytest.mark.parametrize("right", [True, False])
def test_ragged_hints_are_aligned_or_refused(model: nn.Module, right: bool) -> None:
    """Padded on the right, "aligned at its end" is another token of the teacher's row; that was the loss, silently."""
    inputs = two_rows(right)
    expected = compose_loss(model, inputs, alpha_sdpo=1.0).sdpo_jsd
    del inputs["ctx_teacher_loss_mask"]
    if right:
        with pytest.raises(
            ValueError, match=r"marked tokens of rows \[0\] are not the same.*pass ctx_teacher_loss_mask"
        ):
            compose_loss(model, inputs, alpha_sdpo=1.0)
    else:
        torch.testing.assert_close(compose_loss(model, inputs, alpha_sdpo=1.0).sdpo_jsd, expected)


def test_a_mask_over_other_tokens_of_the_same_number_is_refused(model: nn.Module) -> None:
    inputs = batch()
    inputs["ctx_teacher_loss_mask"] = inputs["ctx_teacher_loss_mask"].roll(-1, dims=1)
    with pytest.raises(ValueError, match="are not the same in input_ids"):
        compose_loss(model, inputs, alpha_sdpo=0.1)


def test_an_empty_mask_is_zero_on_the_graph(model: nn.Module) -> None:
    inputs = batch()
    for key in ("sdpo_loss_mask", "ctx_teacher_loss_mask"):
        inputs[key] = torch.zeros_like(inputs[key])
    parts = compose_loss(model, inputs, alpha_sdpo=0.1)
    assert parts.sdpo_jsd == 0 and parts.sdpo_jsd.requires_grad
    torch.testing.assert_close(parts.total, parts.lm_ce)


def test_simpo_needs_no_reference(model: nn.Module) -> None:
    inputs = batch()
    for side in ("chosen", "rejected"):
        del inputs[f"dpo_{side}_ref_logprobs"]
    parts = compose_loss(model, inputs, beta_replay=0.1, dpo_variant="simpo")
    assert parts.trace_replay_dpo > 0
    with pytest.raises(KeyError, match=r'dpo_chosen_ref_logprobs.*Or use "simpo"'):
        compose_loss(model, inputs, beta_replay=0.1)


def test_a_channel_without_its_inputs_is_off(model: nn.Module) -> None:
    inputs = batch()
    del inputs["dpo_rejected_input_ids"]
    inputs["ctx_teacher_input_ids"] = inputs["ctx_teacher_input_ids"][:, :0]
    parts = compose_loss(model, inputs, alpha_sdpo=0.1, beta_replay=0.1)
    assert parts.sdpo_jsd == 0 == parts.trace_replay_dpo and torch.equal(parts.total, parts.lm_ce)


def test_without_a_loss_mask_the_response_is_distilled(model: nn.Module) -> None:
    inputs = batch()
    expected = compose_loss(model, inputs, alpha_sdpo=0.1).sdpo_jsd
    del inputs["sdpo_loss_mask"]
    torch.testing.assert_close(compose_loss(model, inputs, alpha_sdpo=0.1).sdpo_jsd, expected)


def test_dpo_and_simpo_are_their_formulas(model: nn.Module) -> None:
    inputs = batch()
    for side, logp in (("chosen", -3.0), ("rejected", -2.0)):
        inputs[f"dpo_{side}_ref_logprobs"] = torch.tensor([logp])
    logps, lengths = [], []
    for side in ("chosen", "rejected"):
        ids = inputs[f"dpo_{side}_input_ids"]
        said = model(input_ids=ids).logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]
        mask = inputs[f"dpo_{side}_response_mask"][0, 1:].bool()
        logps.append(said[mask].sum())
        lengths.append(mask.sum())
    z = 0.1 * ((logps[0] + 3.0) - (logps[1] + 2.0))
    dpo = compose_loss(model, inputs, beta_replay=1.0).trace_replay_dpo
    torch.testing.assert_close(dpo, -torch.sigmoid(z).log(), rtol=1e-4, atol=1e-5)
    z = 2.0 * (logps[0] / lengths[0] - logps[1] / lengths[1]) - 1.0
    simpo = compose_loss(model, inputs, beta_replay=1.0, dpo_variant="simpo").trace_replay_dpo
    torch.testing.assert_close(simpo, -torch.sigmoid(z).log(), rtol=1e-4, atol=1e-5)
    anchored = compose_loss(model, inputs, beta_replay=1.0, replay_nll_weight=0.5).trace_replay_dpo
    torch.testing.assert_close(anchored, dpo - 0.5 * logps[0] / lengths[0], rtol=1e-4, atol=1e-5)


def test_settings_that_cannot_be(model: nn.Module) -> None:
    cases: list[tuple[dict[str, object], str]] = [
        ({"alpha_sdpo": -0.1}, "must be at least 0"),
        ({"beta_replay": -0.1}, "must be at least 0"),
        ({"sdpo_wrapper": "jsd"}, "none, taid, entropy_opd, eopd"),
        ({"entropy_opd_h_max": 0.0}, "greater than 0"),
        ({"eopd_threshold": -1.0}, "must be at least 0"),
        ({"sdpo_wrapper": "eopd"}, "eopd_threshold, which is not set"),
        ({"sdpo_jsd_beta": 1.5}, "at most 1"),
    ]
    for settings, words in cases:
        with pytest.raises(ValueError, match=words):
            compose_loss(model, batch(), **settings)  # type: ignore[arg-type]
    other = ToolWorld(kinds=2, names=2).model()
    inputs = {**batch(), "ctx_teacher_input_ids": batch()["ctx_teacher_input_ids"] % 20}
    with pytest.raises(ValueError, match=r"257 tokens and the teacher's \d+"):
        compose_loss(model, inputs, alpha_sdpo=0.1, teacher=other)


def test_wrappers(model: nn.Module) -> None:
    values = {}
    for name in ("none", "taid", "entropy_opd", "eopd"):
        more: dict[str, Any] = {"sdpo_wrapper": name, "eopd_threshold": 0.5 if name == "eopd" else None}
        values[name] = compose_loss(model, batch(), alpha_sdpo=1.0, taid_t=0.5, **more).sdpo_jsd.item()
    assert len(set(values.values())) == 4 and all(value > 0 for value in values.values())
    for t in (None, -0.1, 1.1):
        with pytest.raises(ValueError, match="taid_t"):
            compose_loss(model, batch(), alpha_sdpo=1.0, sdpo_wrapper="taid", taid_t=t)
    with pytest.raises(ValueError, match="dpo_variant"):
        compose_loss(model, batch(), dpo_variant="ipo")  # type: ignore[arg-type]


def test_the_quickstart_batch_is_learned(model: nn.Module) -> None:
    inputs = batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        parts = compose_loss(model, inputs, alpha_sdpo=0.1, beta_replay=0.05)
        optimizer.zero_grad()
        parts.total.backward()
        optimizer.step()
        losses.append(parts.total.item())
    assert losses[-1] < 0.5 * losses[0]
