"""Loss kernels against float64 references: the papers' formulas, torch.distributions, TRL's own functions; loss,
gradient, edges, and what they keep in memory."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

from inner.losses import chunks
from inner.losses.divergence import generalized_jsd_loss
from inner.losses.opd import entropy_aware_opd_loss, eopd_loss, teacher_entropy
from inner.losses.preference import dpo_loss, sequence_logprobs, simpo_loss
from inner.losses.sdpo import sdpo_loss
from inner.losses.taid import TAIDScheduler, taid_loss

B, T, V = 2, 3, 5
pytestmark = pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental")


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
    for mask in (torch.tensor([[1.0, 0, 1], [0, 0, 1]]), torch.ones(B, T, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"0/1 mask.*torch\.where"):
            generalized_jsd_loss(student, teacher, mask)


def test_labels_that_are_the_ids_0_and_1_are_learned_with_a_warning() -> None:
    """They may be a mask, or two tokens; a mask of integers cannot be told from them."""
    student, teacher = pair()
    with pytest.warns(UserWarning, match=r"0/1 mask.*torch\.where"):
        loss = generalized_jsd_loss(student, teacher, torch.tensor([[1, 0, 1], [0, 0, 1]]))
    assert torch.equal(loss, generalized_jsd_loss(student, teacher, torch.full((B, T), 5)))


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


def reference_t(losses: list[float], n: int, alpha: float, beta: float = 0.99) -> list[float]:
    """SakanaAI/TAID's update_t (0.4 to 1.0) in float64, with torch's sigmoid."""
    t, momentum, previous = (torch.tensor(x, dtype=torch.float64) for x in (0.4, 0.0, torch.inf))
    found = []
    for step, loss in enumerate(torch.tensor(losses, dtype=torch.float64)):
        line = torch.tensor(0.4 + 0.6 * step / n, dtype=torch.float64)
        if previous.isfinite():
            momentum = beta * momentum + (1 - beta) * (previous - loss) / (previous + 1e-15)
            line = torch.maximum(line, t + alpha * torch.sigmoid(momentum) * (1 - t))
        t, previous = line.clamp(max=1.0), loss
        found.append(float(t))
    return found


@pytest.mark.parametrize("alpha", [5e-4, 0.05])
@pytest.mark.parametrize(
    "losses",
    [
        [2.0 * 0.97**i for i in range(60)],
        [1e-5, 1.0, 1e-5, 1.0, 0.5],  # a momentum of -1000
        [1.0 + 0.5 * (-1) ** i for i in range(30)],
        [1e-300, 1e300, 1.0],
    ],
)
def test_taid_scheduler_is_upstreams_rule(losses: list[float], alpha: float) -> None:
    schedule = TAIDScheduler(num_train_steps=50, alpha=alpha)
    found = [schedule.update_t(loss, step) for step, loss in enumerate(losses)]
    assert found == pytest.approx(reference_t(losses, 50, alpha), abs=1e-14)


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("silent", [0.0, math.nan, math.inf])
def test_taids_t_is_never_behind_the_line_and_never_falls(silent: float, adaptive: bool) -> None:
    """A replica whose batches have nothing to distil optimises the same target as the others."""
    schedule = TAIDScheduler(num_train_steps=10, disable_adaptive=not adaptive)
    assert schedule.update_t(silent, 3) == pytest.approx(0.58)  # also before there was any loss
    losses_and_steps = [(1.0, 5), (silent, 6), (0.5, 7), (silent, 4), (silent, 99)]
    seen = [schedule.update_t(loss, step) for loss, step in losses_and_steps]
    assert seen == sorted(seen)
    assert seen == pytest.approx([0.7, 0.76, 0.82, 0.82, 1.0], abs=2e-3)


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


# Every distillation loss: (student, teacher, 0/1 mask) -> scalar, and what it is with the teacher equal to the student

Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]


def as_labels(mask: Tensor) -> Tensor:
    return torch.where(mask.bool(), 0, -100)


KERNELS: dict[str, Kernel] = {
    "forward KL": lambda s, t, m: generalized_jsd_loss(s, t, as_labels(m), beta=0.0),
    "JSD": lambda s, t, m: generalized_jsd_loss(s, t, as_labels(m), beta=0.5),
    "reverse KL": lambda s, t, m: generalized_jsd_loss(s, t, as_labels(m), beta=1.0),
    "clipped": lambda s, t, m: generalized_jsd_loss(s, t, as_labels(m), beta=0.0, token_clip=0.3),
    "teacher's top 2": lambda s, t, m: generalized_jsd_loss(s, t, as_labels(m), top_k=2),
    "sdpo": lambda s, t, m: sdpo_loss(s, t, as_labels(m), torch.full(m.shape, -1.5, dtype=torch.float64), top_k=2),
    "sdpo, no tail": lambda s, t, m: sdpo_loss(s, t, as_labels(m), top_k=2, add_tail=False),
    "sdpo, all tokens": lambda s, t, m: sdpo_loss(s, t, as_labels(m), top_k=None, alpha=1.0),
    "taid": lambda s, t, m: taid_loss(s, t, m, 0.6),
    "soft gate": lambda s, t, m: entropy_aware_opd_loss(s, t, m, 1.0),
    "hard gate": lambda s, t, m: eopd_loss(s, t, m, 1.0),
}
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS.keys())
MASK = torch.tensor([[1, 0, 1], [0, 1, 1]])


def finite_with_gradient(loss: Tensor, student: Tensor) -> Tensor:
    gradient = torch.autograd.grad(loss, student)[0]
    assert loss.isfinite() and gradient.isfinite().all()
    return gradient


@pytest.mark.parametrize(
    "name", sorted(KERNELS.keys() - {"taid", "sdpo"})
)  # these hold a target, or a weight, constant
def test_gradients_are_the_loss_s_own(name: str) -> None:
    student, teacher = pair()
    assert torch.autograd.gradcheck(lambda s: KERNELS[name](s, teacher, MASK), (student,))


@every_kernel
def test_empty_and_all_masked_are_zero_on_the_graph(kernel: Kernel) -> None:
    student, teacher = pair()
    loss = kernel(student, teacher, torch.zeros_like(MASK))
    assert loss.item() == 0 and (finite_with_gradient(loss, student) == 0).all()
    nothing = torch.zeros(0, T, V, dtype=torch.float64, requires_grad=True)
    loss = kernel(nothing, nothing.detach(), MASK[:0])
    assert loss.item() == 0 and finite_with_gradient(loss, nothing).shape == nothing.shape


@every_kernel
def test_one_token(kernel: Kernel) -> None:
    """One position is its own mean: the masked others do not matter."""
    student, teacher = pair()
    one = torch.zeros_like(MASK)
    one[1, 2] = 1
    whole, gradient = kernel(student, teacher, one), torch.autograd.grad(kernel(student, teacher, one), student)[0]
    alone = student.detach()[1:, 2:].clone().requires_grad_()
    torch.testing.assert_close(kernel(alone, teacher[1:, 2:], one[1:, 2:]), whole)
    torch.testing.assert_close(
        torch.autograd.grad(kernel(alone, teacher[1:, 2:], one[1:, 2:]), alone)[0], gradient[1:, 2:]
    )
    assert (gradient[one == 0] == 0).all()


@every_kernel
def test_equal_distributions_teach_nothing(kernel: Kernel) -> None:
    student = draw(1, B, T, V).requires_grad_()
    assert finite_with_gradient(kernel(student, student.detach(), MASK), student).abs().max() < 1e-12
    shifted = kernel(student, student.detach() + 7.0, MASK)  # a constant on the logits is not a difference
    assert torch.autograd.grad(shifted, student)[0].abs().max() < 1e-12


@every_kernel
@pytest.mark.parametrize("scale", [1e4, 1e30])
def test_huge_logits_are_finite(kernel: Kernel, scale: float) -> None:
    student = (scale * draw(1, B, T, V)).requires_grad_()
    finite_with_gradient(kernel(student, student.detach().roll(1, -1), MASK), student)


@every_kernel
def test_one_hot_teacher(kernel: Kernel) -> None:
    """As logits of -inf: where a KL would be infinite, log 0 counts as -708 (in float64)."""
    student, _ = pair()
    teacher = torch.full((B, T, V), -math.inf, dtype=torch.float64)
    teacher[..., 3] = 0.0
    loss = kernel(student, teacher, MASK)
    finite_with_gradient(loss, student)
    other_way = kernel(teacher.requires_grad_(), student.detach(), MASK)
    finite_with_gradient(other_way, teacher)


def test_log_0_is_a_number() -> None:
    student, _ = pair()
    one_hot = torch.full((B, T, V), -math.inf, dtype=torch.float64)
    one_hot[..., 3] = 0.0
    s = probabilities(student)
    floor = math.log(torch.finfo(torch.float64).tiny)
    reverse = ((s * s.log()).sum(-1) - (1 - s[..., 3]) * floor).sum() / B
    same_loss_and_gradient(generalized_jsd_loss(student, one_hot, beta=1.0), reverse, student)
    forward = -probabilities(student)[..., 3].log().sum() / B  # cross-entropy with the one token
    same_loss_and_gradient(generalized_jsd_loss(student, one_hot, beta=0.0), forward, student)


@every_kernel
def test_tokens_that_both_rule_out_do_not_matter(kernel: Kernel) -> None:
    student, teacher = pair()
    dead, alive = torch.arange(V) == 1, [0, 2, 3, 4]
    ours = kernel(student.masked_fill(dead, -math.inf), teacher.masked_fill(dead, -math.inf), MASK)
    reference = kernel(student[..., alive], teacher[..., alive], MASK)
    same_loss_and_gradient(ours, reference, student)


@every_kernel
def test_dtypes(kernel: Kernel) -> None:
    student, teacher = pair()
    assert kernel(student, teacher, MASK).dtype == torch.float64
    exact = kernel(student, teacher, MASK).item()
    low = student.detach().bfloat16().requires_grad_()
    loss = kernel(low, teacher.bfloat16(), MASK)
    assert loss.dtype in (torch.float32, torch.float64) and loss.item() == pytest.approx(exact, abs=0.05)
    assert torch.autograd.grad(loss, low)[0].dtype == torch.bfloat16


@every_kernel
def test_nan_is_refused(kernel: Kernel) -> None:
    student, teacher = pair()
    teacher[0, 0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN at 1 of 4 positions"):
        kernel(student, teacher, MASK)


@every_kernel
def test_in_pieces_it_is_the_same(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = pair()
    whole = kernel(student, teacher, MASK)
    gradient = torch.autograd.grad(whole, student)[0]
    monkeypatch.setattr(chunks, "CHUNK", 3 * V)  # three positions, then one
    pieces = kernel(student, teacher, MASK)
    torch.testing.assert_close(pieces, whole, rtol=1e-13, atol=0)
    torch.testing.assert_close(torch.autograd.grad(pieces, student)[0], gradient, rtol=1e-12, atol=1e-15)


def test_the_teacher_may_learn_too(monkeypatch: pytest.MonkeyPatch) -> None:
    student, teacher = pair()
    teacher.requires_grad_()
    monkeypatch.setattr(chunks, "CHUNK", V)
    assert torch.autograd.gradcheck(lambda s, t: generalized_jsd_loss(s, t, as_labels(MASK)), (student, teacher))


@every_kernel
def test_pieces_keep_nothing_but_the_logits(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the two inputs and a few numbers per position are kept for the backward pass."""

    def kept(limit: int) -> int:
        monkeypatch.setattr(chunks, "CHUNK", limit)
        student, teacher = draw(1, 8, 16, 64).requires_grad_(), draw(2, 8, 16, 64)
        inputs, seen = {student.data_ptr(), teacher.data_ptr()}, {}

        def pack(x: Tensor) -> Tensor:
            if x.data_ptr() not in inputs:
                seen[x.data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            kernel(student, teacher, torch.ones(8, 16))
        return sum(seen.values())

    logits = 8 * 16 * 64 * 8
    assert kept(4 * 64) < logits / 8
    if kernel is not KERNELS["teacher's top 2"]:  # which makes little to begin with
        assert kept(2**30) > logits


# Against others' code


def categorical(logits: Tensor) -> Categorical:
    return Categorical(logits=logits)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_jsd_equals_torch_distributions(beta: float) -> None:
    student, teacher = pair()
    s, t = categorical(student), categorical(teacher)
    if beta in (0, 1):
        reference = (kl_divergence(t, s) if beta == 0 else kl_divergence(s, t)).sum() / B
    else:
        m = Categorical(probs=(1 - beta) * s.probs + beta * t.probs)
        reference = (beta * kl_divergence(t, m) + (1 - beta) * kl_divergence(s, m)).sum() / B
    same_loss_and_gradient(generalized_jsd_loss(student, teacher, beta=beta), reference, student)


def test_the_ends_are_jumps() -> None:
    """Near an end the loss is that end's KL times the distance to it, so a weight does not carry over."""
    student, teacher = pair()
    near = 1e-7
    forward, reverse = (generalized_jsd_loss(student, teacher, beta=b).item() for b in (0.0, 1.0))
    assert generalized_jsd_loss(student, teacher, beta=near).item() == pytest.approx(near * forward, rel=1e-5)
    assert generalized_jsd_loss(student, teacher, beta=1 - near).item() == pytest.approx(near * reverse, rel=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("reduction", ["batchmean", "sum"])
def test_jsd_equals_trl(beta: float, reduction: Any) -> None:
    from trl.experimental.gkd.gkd_trainer import GKDTrainer

    student, teacher = pair()
    labels = torch.tensor([[7, -100, 3], [-100, -100, 4]])
    theirs = GKDTrainer.generalized_jsd_loss(student, teacher, labels, beta, 0.7, reduction)
    same_loss_and_gradient(generalized_jsd_loss(student, teacher, labels, beta, 0.7, reduction), theirs, student)


def test_jsd_takes_a_full_mask_made_into_labels() -> None:
    student, teacher = pair()
    whole = generalized_jsd_loss(student, teacher, torch.zeros(B, T, dtype=torch.long), reduction="sum")
    torch.testing.assert_close(whole, generalized_jsd_loss(student, teacher, reduction="sum"))
    with pytest.raises(ValueError, match="0/1 mask"):
        generalized_jsd_loss(student, teacher, torch.ones(B, T))
    with pytest.raises(ValueError, match="vocabularies differ"):
        generalized_jsd_loss(student, teacher[..., :4])
    for wrong in ({"reduction": "avg"}, {"top_k": 0}, {"token_clip": 0.0}, {"temperature": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            generalized_jsd_loss(student, teacher, **wrong)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("add_tail", [True, False])
def test_sdpo_equals_trl(alpha: float, add_tail: bool) -> None:
    from trl.experimental.sdpo import loss_utils

    student, teacher = pair()
    labels, offset = torch.tensor([[3, -100, 1], [-100, 2, 4]]), torch.tensor([[1.5, 9.0, -0.3], [9.0, 0.2, 2.0]])
    kept = labels != -100

    def theirs() -> Tensor:
        return loss_utils.compute_topk_self_distillation_loss(
            student, teacher, distillation_topk=2, distillation_alpha=alpha, distillation_add_tail=add_tail
        )

    logp = student.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    old = logp.detach() - offset  # ratios on both sides of the clip
    reference = loss_utils.apply_importance_sampling_clipping(theirs(), logp, old, 2.0)[kept].sum() / kept.sum()
    ours = sdpo_loss(student, teacher, labels, old, alpha=alpha, top_k=2, add_tail=add_tail)
    same_loss_and_gradient(ours, reference, student)
    on_policy = sdpo_loss(student, teacher, labels, alpha=alpha, top_k=2, add_tail=add_tail)
    same_loss_and_gradient(on_policy, theirs()[kept].mean(), student)


def test_sdpo_s_ratio_is_taken_at_the_temperature_of_sampling() -> None:
    """So it is 1 before any step, whatever the divergence's own temperature is."""
    student, teacher = pair()
    labels = torch.zeros(B, T, dtype=torch.long)
    old = probabilities(student.detach(), 0.7)[..., 0].log()
    on_policy = sdpo_loss(student, teacher, labels, temperature=2.0)
    same_loss_and_gradient(
        sdpo_loss(student, teacher, labels, old, temperature=2.0, sampling_temperature=0.7), on_policy, student
    )


def test_sdpo_is_the_paper_s_reverse_kl() -> None:
    student, teacher = pair()
    labels = torch.zeros(B, T, dtype=torch.long)
    for everything in (None, V, 100):
        reference = kl_divergence(categorical(student), categorical(teacher)).mean()
        same_loss_and_gradient(sdpo_loss(student, teacher, labels, alpha=1.0, top_k=everything), reference, student)


def test_sdpo_tail_is_one_bucket() -> None:
    """Two tokens kept of five: a distribution over three."""
    student, teacher = pair()
    s, t = probabilities(student), probabilities(teacher)
    kept = s.argsort(-1, descending=True)[..., :2]

    def bucketed(p: Tensor) -> Tensor:
        top = p.gather(-1, kept)
        return torch.cat([top, 1 - top.sum(-1, keepdim=True)], -1)

    reference = kl(bucketed(t), bucketed(s)).mean()
    labels = torch.zeros(B, T, dtype=torch.long)
    same_loss_and_gradient(sdpo_loss(student, teacher, labels, alpha=0.0, top_k=2), reference, student)


def test_sdpo_refuses() -> None:
    student, teacher = pair()
    labels = torch.zeros(B, T, dtype=torch.long)
    for wrong, words in (
        ({"alpha": -0.1}, "outside"),
        ({"top_k": 0}, "top_k"),
        ({"is_clip": 0.0}, "is_clip"),
        ({"old_logprobs": torch.zeros(B)}, "old_logprobs"),
        ({"labels": MASK.bool()}, "0/1 mask"),
    ):
        with pytest.raises(ValueError, match=words):
            sdpo_loss(student, teacher, **{"labels": labels, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("threshold", [0.0, 1.0, 9.0])
def test_the_hard_gate_equals_the_formula(threshold: float) -> None:
    student, teacher = pair()
    s, t = probabilities(student), probabilities(teacher)
    gate = (-(t * t.log()).sum(-1) > threshold).double()
    assert threshold != 1.0 or 0 < (gate * MASK).sum() < MASK.sum()
    reference = ((kl(s, t) + gate * kl(t, s)) * MASK).sum() / MASK.sum()
    same_loss_and_gradient(eopd_loss(student, teacher, MASK, threshold), reference, student)
    with pytest.raises(ValueError, match="threshold"):
        eopd_loss(student, teacher, MASK, -1.0)
    with pytest.raises(ValueError, match="labels != -100"):
        eopd_loss(student, teacher, as_labels(MASK), 1.0)


def test_sequence_logprobs_equal_trl_s_at_unequal_lengths() -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    logits = draw(3, 3, 6, V).requires_grad_()
    ids = torch.arange(18).reshape(3, 6) % V
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0], [0, 0, 0, 0, 0, 1]])
    for average in (False, True):
        theirs = CPOTrainer.get_batch_logps(logits, torch.where(mask.bool(), ids, -100), average)
        same_loss_and_gradient(sequence_logprobs(logits, ids, mask, average).sum(), theirs.sum(), logits)
    assert sequence_logprobs(logits[:0], ids[:0], mask[:0]).shape == (0,)
    with pytest.raises(ValueError, match="do not fit"):
        sequence_logprobs(logits, ids, mask[:, 1:])


def test_sequence_logprobs_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = draw(3, 3, 6, V).requires_grad_()
    ids, mask = torch.arange(18).reshape(3, 6) % V, torch.ones(3, 6)
    whole = sequence_logprobs(logits, ids, mask).pow(2).sum()
    gradient = torch.autograd.grad(whole, logits)[0]
    monkeypatch.setattr(chunks, "CHUNK", 2 * V)
    pieces = sequence_logprobs(logits, ids, mask).pow(2).sum()
    torch.testing.assert_close(torch.autograd.grad(pieces, logits)[0], gradient, rtol=1e-12, atol=0)


def test_dpo_s_gradient_is_the_paper_s() -> None:
    """Section 4: -β σ(r̂_l - r̂_w) [∇ log π(y_w) - ∇ log π(y_l)]; at π = ref the loss is log 2."""
    chosen, rejected = draw(4, 3).requires_grad_(), draw(5, 3).requires_grad_()
    ref_c, ref_r = draw(6, 3), draw(7, 3)
    gradients = torch.autograd.grad(dpo_loss(chosen, rejected, ref_c, ref_r, beta=0.3), (chosen, rejected))
    weight = -0.3 * torch.sigmoid(0.3 * ((rejected - ref_r) - (chosen - ref_c))) / 3
    torch.testing.assert_close(gradients, (weight.detach(), -weight.detach()))
    at_start = dpo_loss(ref_c, ref_r, ref_c, ref_r)
    assert at_start.item() == pytest.approx(math.log(2))


def test_dpo_anchors() -> None:
    chosen, rejected = draw(4, 3).requires_grad_(), draw(5, 3)
    ref_c, ref_r = chosen.detach() + torch.tensor([0.7, -0.2, 0.1]), draw(7, 3)
    tokens = torch.tensor([2, 5, 1])
    z = (chosen - ref_c) - (rejected - ref_r)
    plain = -torch.sigmoid(0.2 * z).log().mean()
    nll = dpo_loss(chosen, rejected, ref_c, ref_r, 0.2, nll_weight=0.5, chosen_tokens=tokens)
    same_loss_and_gradient(nll, plain + 0.5 * (-chosen / tokens).mean(), chosen)
    z, less_likely = (chosen - ref_c) - (rejected - ref_r), torch.relu(ref_c - chosen)
    assert (less_likely > 0).any() and (less_likely == 0).any()
    positive = dpo_loss(chosen, rejected, ref_c, ref_r, 0.2, dpop_lambda=5.0)
    same_loss_and_gradient(positive, -torch.sigmoid(0.2 * (z - 5.0 * less_likely)).log().mean(), chosen)
    with pytest.raises(ValueError, match="chosen_tokens"):
        dpo_loss(chosen, rejected, ref_c, ref_r, nll_weight=0.5)


def test_simpo_equals_trl() -> None:
    from trl.experimental.cpo.cpo_trainer import CPOTrainer

    trainer = SimpleNamespace(
        alpha=0.0, accelerator=SimpleNamespace(device="cpu"), loss_type="simpo", simpo_gamma=1.0, beta=2.0
    )
    trainer.label_smoothing = 0.0
    chosen, rejected = draw(8, 3).requires_grad_(), draw(9, 3)
    theirs = CPOTrainer.cpo_loss(trainer, chosen, rejected)[0].mean()  # type: ignore[arg-type]
    same_loss_and_gradient(simpo_loss(chosen, rejected), theirs, chosen)


def test_preferences_without_pairs_and_with_negative_weights() -> None:
    none = torch.zeros(0, dtype=torch.float64, requires_grad=True)
    for loss in (dpo_loss(none, none, none.detach(), none.detach()), simpo_loss(none, none)):
        assert loss.item() == 0 and torch.autograd.grad(loss, none)[0].shape == (0,)
    one = torch.zeros(1)
    for wrong in ({"beta": -1.0}, {"nll_weight": -1.0}, {"dpop_lambda": -1.0}, {"label_smoothing": -0.1}):
        with pytest.raises(ValueError, match="must be 0 or more"):
            dpo_loss(one, one, one, one, **wrong)
    with pytest.raises(ValueError, match="would prefer the rejected response"):
        dpo_loss(one, one, one, one, label_smoothing=0.5)
    with pytest.raises(ValueError, match="gamma = -1"):
        simpo_loss(one, one, gamma=-1.0)
    hopeless = torch.tensor([-1e4], dtype=torch.float64, requires_grad=True)
    finite_with_gradient(simpo_loss(hopeless, -hopeless.detach()), hopeless)


def test_taid_equals_upstream() -> None:
    """SakanaAI/TAID's compute_loss, as it is written there."""
    student, teacher = pair()
    for t in (0.0, 0.1, 0.4, 0.9, 1.0):
        p_t = (1 - t) * student.detach() + t * teacher
        target = torch.softmax(p_t, dim=-1, dtype=torch.float64)
        products = target * torch.log_softmax(student, dim=-1)
        reference = -torch.sum(products.sum(-1).view(-1) * MASK.view(-1)) / MASK.sum()
        same_loss_and_gradient(taid_loss(student, teacher, MASK, t), reference, student)
    forward = generalized_jsd_loss(student, teacher, as_labels(MASK), beta=0.0)
    at_one = torch.autograd.grad(taid_loss(student, teacher, MASK, 1.0), student)[0]
    torch.testing.assert_close(at_one, torch.autograd.grad(forward, student)[0])
