"""Loss kernels against float64 references written from the papers' formulas: loss, gradient, edges."""

import math

import pytest
import torch
from torch import Tensor

from inner.losses.divergence import generalized_jsd_loss
from inner.losses.opd import entropy_aware_opd_loss, teacher_entropy
from inner.losses.preference import dpo_loss, sequence_logprobs, simpo_loss
from inner.losses.taid import TAIDScheduler, taid_loss

B, T, V = 2, 3, 5


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def pair() -> tuple[Tensor, Tensor]:
    return draw(1, B, T, V).requires_grad_(), 2 * draw(2, B, T, V)


def probabilities(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax by its definition, not by the function under test."""
    weights = (logits / temperature - (logits / temperature).amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


def kl(p: Tensor, q: Tensor) -> Tensor:
    return (p * (p.log() - q.log())).sum(-1)


def jsd_reference(student: Tensor, teacher: Tensor, beta: float, temperature: float = 1.0) -> Tensor:
    s, t = probabilities(student, temperature), probabilities(teacher, temperature)
    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = (1 - beta) * s + beta * t
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def same_loss_and_gradient(ours: Tensor, reference: Tensor, logits: Tensor) -> None:
    ours_grad = torch.autograd.grad(ours, logits)[0]
    reference_grad = torch.autograd.grad(reference, logits)[0]
    assert ours.dtype == torch.float64
    torch.testing.assert_close(ours, reference, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(ours_grad, reference_grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_jsd_equals_the_formula(beta: float, temperature: float) -> None:
    student, teacher = pair()
    labels = torch.tensor([[7, -100, 3], [-100, -100, 4]])
    ours = generalized_jsd_loss(student, teacher, labels, beta=beta, temperature=temperature)
    reference = jsd_reference(student, teacher, beta, temperature)[labels != -100].sum() / 3
    same_loss_and_gradient(ours, reference, student)


def test_jsd_reductions() -> None:
    student, teacher = pair()
    total = jsd_reference(student, teacher, 0.5).sum()
    expected = {"batchmean": total / B, "sum": total, "mean": total / (B * T * V)}
    for reduction, value in expected.items():
        ours = generalized_jsd_loss(student, teacher, reduction=reduction)  # type: ignore[arg-type]
        torch.testing.assert_close(ours, value)
    assert generalized_jsd_loss(student, teacher, reduction="none").shape == (B, T, V)


def test_jsd_direction_of_the_ends() -> None:
    """β = 0 punishes a student that misses what the teacher does; β = 1 one that does what the teacher does not."""
    teacher = torch.tensor([[[0.5, 0.4999, 0.0001]]], dtype=torch.float64).log()
    misses = torch.tensor([[[0.9998, 0.0001, 0.0001]]], dtype=torch.float64).log()
    forward = generalized_jsd_loss(misses, teacher, beta=0.0)
    reverse = generalized_jsd_loss(misses, teacher, beta=1.0)
    assert forward > 3 > 1 > reverse


def test_jsd_clip_is_per_vocabulary_entry_and_one_sided() -> None:
    student, teacher = pair()
    s, t = probabilities(student), probabilities(teacher)
    entries = t * (t.log() - s.log())
    assert (entries < 0).any() and (entries > 0.05).any()
    ours = generalized_jsd_loss(student, teacher, beta=0.0, token_clip=0.05, reduction="sum")
    same_loss_and_gradient(ours, entries.clamp(max=0.05).sum(), student)
    assert ours < 0  # upper side only


def test_jsd_top_k_is_the_teachers() -> None:
    student, teacher = pair()
    kept = teacher.argsort(-1, descending=True)[..., :2]
    reference = jsd_reference(student.gather(-1, kept), teacher.gather(-1, kept), 0.5).sum()
    same_loss_and_gradient(generalized_jsd_loss(student, teacher, top_k=2, reduction="sum"), reference, student)
    everything = generalized_jsd_loss(student, teacher, top_k=V)
    torch.testing.assert_close(everything, generalized_jsd_loss(student, teacher))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_jsd_survives_impossible_tokens(beta: float) -> None:
    student, teacher = pair()
    dead = torch.zeros(B, T, V, dtype=torch.bool)
    dead[..., 1] = True
    ours = generalized_jsd_loss(student.masked_fill(dead, -math.inf), teacher.masked_fill(dead, -math.inf), beta=beta)
    alive = [0, 2, 3, 4]
    same_loss_and_gradient(ours, jsd_reference(student[..., alive], teacher[..., alive], beta).sum() / B, student)


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_jsd_teacher_alone_rules_a_token_out(beta: float) -> None:
    student, teacher = pair()
    teacher = teacher.clone()
    teacher[..., 0] = -math.inf
    loss = generalized_jsd_loss(student, teacher, beta=beta)
    loss.backward()
    assert loss.isfinite() and student.grad is not None and student.grad.isfinite().all()


def test_jsd_without_valid_positions_is_zero_on_the_graph() -> None:
    student, teacher = pair()
    loss = generalized_jsd_loss(student, teacher, torch.full((B, T), -100))
    loss.backward()
    assert loss.item() == 0 and student.grad is not None and (student.grad == 0).all()


def test_jsd_refuses_a_mask_as_labels() -> None:
    student, teacher = pair()
    for mask in (torch.tensor([[1, 0, 1], [0, 0, 1]]), torch.ones(B, T, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"0/1 mask.*torch\.where"):
            generalized_jsd_loss(student, teacher, mask)


def test_jsd_refuses_other_shapes() -> None:
    student, teacher = pair()
    with pytest.raises(ValueError, match="by index"):
        generalized_jsd_loss(student, teacher[:, :2])
    with pytest.raises(ValueError, match="labels"):
        generalized_jsd_loss(student, teacher, torch.full((B, T + 1), 5))
    with pytest.raises(ValueError, match="beta"):
        generalized_jsd_loss(student, teacher, beta=1.5)


def test_jsd_half_precision_is_computed_in_float32() -> None:
    student, teacher = pair()
    low = generalized_jsd_loss(student.detach().bfloat16(), teacher.bfloat16())
    assert low.dtype == torch.float32
    assert abs(low.item() - generalized_jsd_loss(student, teacher).item()) < 0.05


def test_sequence_logprobs_shift_and_mask() -> None:
    logits = draw(3, 2, 4, V).requires_grad_()
    ids = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]])
    logp = probabilities(logits).log()
    # token 2 of row 0 is predicted by the logits at 1, and so on
    expected = torch.stack([logp[0, 1, 2] + logp[0, 2, 3], logp[1, 0, 3]])
    same_loss_and_gradient(sequence_logprobs(logits, ids, mask).sum(), expected.sum(), logits)
    torch.testing.assert_close(
        sequence_logprobs(logits, ids, mask, average=True), expected / torch.tensor([2.0, 1.0], dtype=torch.float64)
    )
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        sequence_logprobs(logits, ids, torch.tensor([[0, 1, 1, 1], [1, 0, 0, 0]]))


def test_dpo_equals_the_formula() -> None:
    chosen, rejected = draw(4, 3).requires_grad_(), draw(5, 3)
    ref_c, ref_r = draw(6, 3), draw(7, 3)
    z = 0.3 * ((chosen - ref_c) - (rejected - ref_r))
    sigma = 1 / (1 + (-z).exp())
    reference = (-(sigma.log()) * 0.9 - (1 - sigma).log() * 0.1).mean()
    ours = dpo_loss(chosen, rejected, ref_c, ref_r, beta=0.3, label_smoothing=0.1)
    same_loss_and_gradient(ours, reference, chosen)


def test_dpo_of_a_hopeless_pair_is_finite() -> None:
    z = torch.tensor([-1e4])
    assert dpo_loss(z, -z, torch.zeros(1), torch.zeros(1)).item() == pytest.approx(2000.0)


def test_simpo_equals_the_formula() -> None:
    chosen, rejected = draw(8, 3).requires_grad_(), draw(9, 3)
    reference = -(1 / (1 + (-(2.0 * (chosen - rejected) - 1.0)).exp())).log().mean()
    same_loss_and_gradient(simpo_loss(chosen, rejected), reference, chosen)
    # gamma is absolute: at equal log-probs the loss does not depend on beta
    equal = torch.zeros(1)
    assert simpo_loss(equal, equal, beta=2.0) == simpo_loss(equal, equal, beta=9.0)
    with pytest.raises(ValueError, match="shapes"):
        simpo_loss(torch.zeros(3), torch.zeros(1))


@pytest.mark.parametrize("t", [0.0, 0.4, 1.0])
def test_taid_equals_the_formula(t: float) -> None:
    student, teacher = pair()
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    p = probabilities((1 - t) * student.detach() + t * teacher)
    reference = -((p * probabilities(student).log()).sum(-1) * mask).sum() / mask.sum()
    same_loss_and_gradient(taid_loss(student, teacher, mask, t), reference, student)


def test_taid_ends() -> None:
    student, teacher = pair()
    mask = torch.ones(B, T)
    at_zero = taid_loss(student, teacher, mask, t=0.0)
    assert at_zero == taid_loss(student, -5 * teacher, mask, t=0.0)  # the teacher is hidden
    assert torch.autograd.grad(at_zero, student)[0].abs().max() < 1e-12  # and nothing is learned
    impossible = student.masked_fill(torch.arange(V) == 0, -math.inf)
    assert taid_loss(impossible, teacher.masked_fill(torch.arange(V) == 0, -math.inf), mask, t=1.0).isfinite()
    empty = taid_loss(student, teacher, torch.zeros(B, T), t=0.5)
    assert empty.item() == 0 and empty.requires_grad
    with pytest.raises(ValueError, match="outside"):
        taid_loss(student, teacher, mask, t=1.1)


def test_taid_scheduler_by_hand() -> None:
    schedule = TAIDScheduler(num_train_steps=10, alpha=0.5)
    assert schedule.update_t(2.0, 0) == 0.4  # the first call only remembers
    momentum = 0.01 * (2.0 - 1.0) / 2.0
    expected = 0.4 + 0.5 / (1 + math.exp(-momentum)) * 0.6
    assert schedule.update_t(1.0, 1) == pytest.approx(expected, abs=1e-12)
    assert schedule.update_t(0.0, 2) == pytest.approx(expected)  # an empty batch says nothing
    assert schedule.update_t(1.0, 99) == 1.0
    linear = TAIDScheduler(num_train_steps=10, disable_adaptive=True)
    linear.update_t(1.0, 0)
    assert linear.update_t(1.0, 5) == pytest.approx(0.7)
    assert linear.update_t(1.0, 50) == 1.0


def test_taid_scheduler_is_the_line_in_short_runs() -> None:
    schedule = TAIDScheduler(num_train_steps=100)
    for step in range(60):
        schedule.update_t(2.0 * 0.9**step, step)
    assert schedule.t == pytest.approx(0.4 + 0.6 * 59 / 100)


@pytest.mark.parametrize("h_max", [None, 0.8])
def test_entropy_opd_equals_the_formula(h_max: float | None) -> None:
    student, teacher = pair()
    mask = torch.tensor([[1, 0, 1], [0, 1, 1]])
    s, t = probabilities(student), probabilities(teacher)
    w = (-(t * t.log()).sum(-1) / (h_max or math.log(V))).clamp(0, 1)
    reference = ((w * kl(t, s) + (1 - w) * kl(s, t)) * mask).sum() / mask.sum()
    same_loss_and_gradient(entropy_aware_opd_loss(student, teacher, mask, h_max), reference, student)


def test_entropy_opd_edges() -> None:
    student, teacher = pair()
    mask = torch.ones(B, T)
    assert entropy_aware_opd_loss(student, student.detach(), mask).abs() < 1e-12
    assert teacher_entropy(torch.zeros(4).log_softmax(-1)).item() == pytest.approx(math.log(4))
    one_hot = torch.tensor([0.0, -math.inf, -math.inf])
    assert teacher_entropy(one_hot).item() == 0
    empty = entropy_aware_opd_loss(student, teacher, torch.zeros(B, T))
    assert empty.item() == 0 and empty.requires_grad
