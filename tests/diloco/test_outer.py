"""The arithmetic of the outer loop: reference, bits, property, and torchft's class around it (lean and as it is)."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco.outer.flat import FlatFragment, layout_of, staged_parts
from diloco.outer.loop import OuterLoop
from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import MockManager, StoreManager
from diloco.outer.optimizer import Nesterov, OuterState, nesterov
from diloco.outer.rounds import Work
from diloco.outer.step_report import likely_cause
from diloco.process.watchdog import Watchdog
from diloco.run.config import ConfigError, OuterConfig, OuterError, cut_fragments
from diloco.run.record import read_run
from rendezvous import layout
from rendezvous.agreement.membership import write_control
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.clock import SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import WrongRun
from rendezvous.records.records import Commit
from rendezvous.stores.memory import MemoryStore
from tests.support.absent import forget_torchft, needs_torchft

RNG = np.random.default_rng(7)
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.fixture
def fresh() -> Iterator[str]:
    """A name of a memory store that no other test has."""
    yield f"test-{RNG.integers(1 << 60)}"


def vector(n: int, scale: float = 1.0) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(n, dtype=np.float32) * np.float32(scale))


# ---------------------------------------------------------------- the step


def test_nesterov_is_sgd_nesterov_but_for_fused_rounding() -> None:
    start = vector(4096)
    param = nn.Parameter(start.clone())
    reference = torch.optim.SGD([param], lr=0.7, momentum=0.9, nesterov=True)
    ours, momentum = start.clone(), torch.zeros(4096)
    mean = vector(4096, 1e-2)
    param.grad = mean.clone()
    reference.step()
    nesterov(ours, momentum, mean, lr=0.7, mu=0.9)
    moved, size = np.abs(ours.numpy() - start.numpy()), np.abs(start.numpy())
    ulps = np.abs(param.detach().numpy() - ours.numpy()) / np.spacing(np.maximum(size, moved))
    assert ulps.max() <= 2 and (ulps <= 1).mean() > 0.99  # 2: results next to a power of two


def test_nesterov_follows_a_float64_reference() -> None:
    theta, momentum = vector(1000), torch.zeros(1000)
    ref_theta, ref_momentum = theta.double().numpy(), np.zeros(1000)
    for _ in range(20):
        mean = vector(1000, 1e-2)
        nesterov(theta, momentum, mean, lr=0.7, mu=0.9)
        ref_momentum = 0.9 * ref_momentum + mean.double().numpy()
        ref_theta = ref_theta - 0.7 * (mean.double().numpy() + 0.9 * ref_momentum)
    assert np.abs(theta.numpy() - ref_theta).max() < 1e-5


def test_nesterov_has_the_same_bits_by_several_threads() -> None:
    n, before, found = 1_000_003, torch.get_num_threads(), set[bytes]()
    start, means = vector(n), [vector(n, 1e-2) for _ in range(2)]
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            theta, momentum = start.clone(), torch.zeros(n)
            for mean in means:
                nesterov(theta, momentum, mean, lr=0.7, mu=0.9)
            found.add(theta.numpy().tobytes() + momentum.numpy().tobytes())
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("partial", [False, True])
def test_one_outer_step_of_n_replicas_against_float64(n: int, partial: bool) -> None:
    """The whole path (offer, commit, weighted mean, Nesterov) for N = 1 … 4, with h < H in some."""
    store, clock, h = MemoryStore(), SystemClock(), [6, 3, 1, 5] if partial else [6] * 4
    write_control(store, clock, replicas=n, min_replicas=n, steps=1)
    start, deltas = vector(257), [vector(257, 0.1) for _ in range(n)]
    states, lives = [], []
    for i in range(n):
        theta = nn.Parameter(start.clone())
        states.append(OuterState([theta.data], [Nesterov(theta, lr=0.7, momentum=0.9)]))
        lives.append(Rendezvous(store, clock, f"r{i:02d}", Rules(1, 6), Timing()))
        lives[i].claim()
        lives[i].join(states[i])
        lives[i].offer(deltas[i].clone().numpy(), h[i])
    for i in range(n):
        commit, out = lives[i].settle(), np.empty(257, np.float32)
        lives[i].mean(commit, out)
        states[i].apply(0, out)
        lives[i].advance(commit)
    weights = np.array(h[:n]) / 6
    mean = sum(w * d.double().numpy() for w, d in zip(weights, deltas, strict=True)) / weights.sum()
    expected = start.double().numpy() - 0.7 * (mean + 0.9 * mean)
    for state in states:
        assert np.abs(state.thetas[0].numpy() - expected).max() < 1e-6
        assert state.digest() == states[0].digest()


# ---------------------------------------------------------------- flat fragments


class Net(nn.Module):
    """Tied, partly frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(torch.tanh(self.mid(self.emb(x)))))


def test_layout_has_every_trainable_parameter_once() -> None:
    assert [name for name, _, _ in layout_of(Net())] == ["emb.weight", "mid.weight", "mid.bias"]


def test_cut_keeps_order_and_balances() -> None:
    assert cut_fragments([1, 1, 1, 1], 2) == [slice(0, 2), slice(2, 4)]
    assert cut_fragments([100, 1, 1, 1], 2) == [slice(0, 1), slice(1, 4)]
    assert cut_fragments([5], 1) == [slice(0, 1)]
    for sizes in ([3, 9, 2, 2, 8, 1], list(range(1, 20)), [1] * 7):
        for fragments in range(1, len(sizes) + 1):
            parts = cut_fragments(sizes, fragments)
            assert [i for p in parts for i in range(p.start, p.stop)] == list(range(len(sizes)))
            assert all(p.start < p.stop for p in parts)
    with pytest.raises(OuterError, match="cannot be cut"):
        cut_fragments([1, 1], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rounding_never_enters_a_pseudogradient(dtype: torch.dtype) -> None:
    live = nn.Parameter(vector(500).to(dtype))
    fragment = FlatFragment([live])
    theta = vector(500)  # fp32 master that the model's dtype cannot hold
    fragment.flat.data.copy_(theta)
    fragment.scatter(merged=False)
    fragment.gather(theta)
    assert torch.equal(fragment.flat.data, theta), "an untouched model must have a pseudogradient of exactly 0"
    before = live.detach().float().clone()
    with torch.no_grad():
        live.add_(0.5)
    fragment.gather(theta)
    moved = (live.detach().float() - before).double()
    assert ((fragment.flat.data.double() - theta.double()) - moved).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_alpha_kept_is_part_of_the_next_pseudogradient_and_no_rounding_is(dtype: torch.dtype) -> None:
    """Twice, as with τ > 0: when Δ is made, and when the outer step lands τ inner steps later."""
    live = nn.Parameter(vector(500).to(dtype))
    fragment, theta = FlatFragment([live]), vector(500)
    merged = theta + vector(500, 0.1)  # what torchft leaves for α > 0
    fragment.flat.data.copy_(merged)
    fragment.scatter(merged=True)
    start = live.detach().double()
    for move in (0.0, 0.25, -0.5):
        with torch.no_grad():
            live.add_(move)
        want = theta.double() - (merged.double() + (live.detach().double() - start))
        got = fragment.delta(theta, torch.empty(500))
        assert (got.double() - want).abs().max() <= 1e-6
        fragment.gather(theta)
        assert torch.equal(theta - fragment.flat.data, got)
    fragment.flat.data.copy_(theta)
    fragment.scatter(merged=False)
    assert torch.equal(fragment.delta(theta, torch.empty(500)), torch.zeros(500)), "a rewrite leaves nothing of it"


def test_a_vector_is_kept_for_the_merge_of_a_16_bit_model_only() -> None:
    for dtype, kept in ((torch.float32, False), (torch.bfloat16, True)):
        fragment = FlatFragment([nn.Parameter(vector(8).to(dtype))])
        fragment.scatter(merged=True)
        assert (fragment.merged is not None) == kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_what_travels_in_parts_has_the_bits_of_the_whole(
    dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, theta, staging = [vector(n).to(dtype) for n in (500, 1, 96)], vector(597), torch.empty(32)
    for p in live:
        values = torch.full((p.numel(),), torch.nan)
        for part, found in staged_parts(p.to(device), staging):
            values[part] = found
        assert torch.equal(values, p.float())
    whole, parts = (FlatFragment([nn.Parameter(p.to(d)) for p in live]) for d in ("cpu", device))
    monkeypatch.setattr(parts, "_host_parts", lambda p: staged_parts(p, staging))
    for fragment in (whole, parts):
        fragment.gather(theta)
    assert torch.equal(whole.flat, parts.flat)
    assert torch.equal(whole.delta(theta, torch.empty(597)), parts.delta(theta, torch.empty(597)))


class Scripted:
    """A Manager of one replica: the mean is its own Δ, but for step 3, which was decided without it."""

    _use_async_quorum = False
    done_with_delta, leaving, fenced, behind, done, h_cap, why = True, False, False, False, False, 1 << 30, ""
    rounds = property(lambda self: self)

    def __init__(self) -> None:
        self.watchdog = Watchdog(SystemClock())
        self.step, self.committed, self.late = 0, False, dict[int, tuple[np.ndarray, torch.Tensor]]()

    def join(self, loop: OuterLoop) -> None:
        self.loop = loop

    def allreduce(self, tensor: torch.Tensor, should_quantize: bool = False) -> Work:
        return Work(lambda: None)

    def should_commit(self) -> bool:
        self.committed = True
        return True

    def current_step(self) -> int:
        return self.step + self.committed

    def finish_round(self) -> int | None:
        if not self.committed:
            return None
        self.committed, self.step = False, self.step + 1
        return (self.step - 1) % 2

    def offer(self, delta: np.ndarray, h: int) -> None:
        fragment = self.loop.fragments[self.step % 2]
        local = torch.cat([p.detach().reshape(-1).double() for p in fragment.live])
        self.late[self.step] = delta.copy(), local

    def catch_up(self, late: Any) -> None:
        if self.step == 3:
            late(3)
            self.before = self.loop.thetas[1].clone()
            self.loop.state.apply(1, np.full(self.loop.state.size(1), 0.125, np.float32))
            self.step = 4

    def progress(self, *_: object) -> None: ...
    def start_quorum(self) -> None: ...
    def register_state_dict_fn(self, *_: object) -> None: ...
    def allow_state_dict_read(self) -> None: ...
    def disallow_state_dict_read(self) -> None: ...
    def close(self, reason: str) -> None: ...


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_late_work_holds_what_alpha_kept_and_is_sent_once(dtype: torch.dtype) -> None:
    """Fragment 1 was merged in step 1; step 3, its next, is decided without us."""
    torch.manual_seed(3)
    model, manager = Net().to(dtype), Scripted()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    config = OuterConfig(sync_every=4, fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5)
    with make_diloco(model, optimizer, manager, config) as loop:
        plain_steps(model, optimizer, 4)  # two syncs
        base = loop.fragments[1].flat.data.clone().double()  # what the merge left
        assert not torch.equal(base.float(), loop.thetas[1])
        start = torch.cat([p.detach().reshape(-1).double() for p in loop.fragments[1].live])
        plain_steps(model, optimizer, 2)  # step 2, and after it the missed step 3
        delta, local = manager.late[3]
        want = manager.before.double() - (base + (local - start))
        assert list(manager.late) == [3] and (torch.from_numpy(delta).double() - want).abs().max() < 1e-6
        assert not torch.equal(loop.thetas[1], manager.before)
        held = torch.cat([p.detach().reshape(-1) for p in loop.fragments[1].live])
        assert torch.equal(held, loop.thetas[1].to(dtype)), "model ← θ: what was offered is gone from it"
        left = loop.fragments[1].delta(loop.thetas[1], torch.empty_like(loop.thetas[1]))
        assert not left.any(), "and enters no later Δ"


# ---------------------------------------------------------------- with torchft's DiLoCo


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[torch.Tensor]:
    """Plain training steps; the flat parameters after each."""
    seen = []
    generator = torch.Generator().manual_seed(3)
    for _ in range(count):
        x = torch.randint(0, 16, (8,), generator=generator)
        loss = nn.functional.cross_entropy(model(x).float(), x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(torch.cat([p.detach().reshape(-1).clone() for p in model.parameters() if p.requires_grad]))
    return seen


def test_n1_h1_lr1_mu0_is_plain_training_within_one_ulp(fresh: str) -> None:
    """Each step from the same θ: the outer step with one replica must be the inner step."""
    torch.manual_seed(0)
    model, twin = Net(), Net()
    manager = MockManager(fresh, replicas=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3)
    generator = torch.Generator().manual_seed(3)
    with make_diloco(model, optimizer, manager, sync_every=1, outer_lr=1.0, outer_momentum=0.0):
        for _ in range(20):
            twin.load_state_dict(model.state_dict())
            theta = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]).numpy()
            inner = torch.optim.SGD([p for p in twin.parameters() if p.requires_grad], lr=0.3)
            x = torch.randint(0, 16, (8,), generator=generator)
            for net, opt in ((twin, inner), (model, optimizer)):
                opt.zero_grad()
                nn.functional.cross_entropy(net(x), x).backward()
                opt.step()
            want = torch.cat([p.detach().reshape(-1) for p in twin.parameters() if p.requires_grad]).numpy()
            got = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]).numpy()
            ulp = np.spacing(np.maximum(np.abs(theta), np.abs(theta - want)))
            assert (np.abs(got - want) <= ulp).all()
    assert manager.current_step() == 20
    manager.shutdown()


@pytest.mark.parametrize(("fragments", "delay", "alpha"), [(1, 0, 0.0), (3, 1, 0.0), (3, 0, 0.5)])
def test_bf16_tied_frozen_model_trains_alone(fresh: str, fragments: int, delay: int, alpha: float) -> None:
    torch.manual_seed(0)
    model = Net().to(torch.bfloat16)
    frozen = model.frozen.weight.detach().clone()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    manager = MockManager(fresh, replicas=1)
    with make_diloco(
        model,
        optimizer,
        manager,
        sync_every=6,
        fragments=fragments,
        fragment_sync_delay=delay,
        fragment_update_alpha=alpha,
    ) as loop:
        plain_steps(model, optimizer, 36)
    assert manager.current_step() == 36 // (6 // fragments)
    assert torch.equal(model.frozen.weight, frozen)
    assert model.head.weight is model.emb.weight
    sizes = [loop.state.size(i) for i in range(fragments)]
    assert sum(sizes) == sum(math.prod(shape) for _, shape, _ in layout_of(model))
    manager.shutdown()


@pytest.mark.quick(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (3, 0), (3, 1)])
def test_lean_fragments_take_the_steps_of_torchfts_own(dtype: torch.dtype, fragments: int, delay: int) -> None:
    def trained(name: str, lean: bool) -> tuple[OuterLoop, list[torch.Tensor], list[str]]:
        torch.manual_seed(0)
        model, manager, bases = Net().to(dtype), MockManager(f"lean-{name}-{lean}", replicas=1), []
        manager.rounds.done_with_delta = lean
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        settings: dict[str, Any] = {"sync_every": 6, "fragments": fragments, "fragment_sync_delay": delay}
        with make_diloco(model, optimizer, manager, **settings, codec="int8") as loop:
            for _ in range(8):
                steps = plain_steps(model, optimizer, 6)
                bases.append(manager.session.rv.base)
        manager.shutdown()
        return loop, steps, bases

    name = f"{dtype}-{fragments}-{delay}"
    (lean, *ours), (stock, *theirs) = trained(name, True), trained(name, False)
    assert ours[1] == theirs[1] and all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert len(set(ours[1])) == 8, "θ moved in every round"
    for part, theta in zip(lean.fragments, lean.thetas, strict=True):
        assert part.flat.data_ptr() == theta.data_ptr(), "a vector less than torchft's"
    assert all(p.flat.data_ptr() != t.data_ptr() for p, t in zip(stock.fragments, stock.thetas, strict=True))


@needs_torchft
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("fragments", "delay", "alpha"), [(1, 0, 0.0), (3, 1, 0.0), (1, 2, 0.5), (3, 1, 0.3)])
def test_a_machine_without_torchft_takes_its_steps(dtype, fragments, delay, alpha, monkeypatch) -> None:
    """torchft has wheels for Linux on x86-64 alone, so a Mac could not install the project."""

    def trained(name: str) -> tuple[list[torch.Tensor], list[str], str]:
        torch.manual_seed(0)
        model, manager, bases = Net().to(dtype), MockManager(f"{name}-{dtype}-{fragments}-{alpha}", replicas=1), []
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        settings: dict[str, Any] = {"fragments": fragments, "fragment_sync_delay": delay}
        with make_diloco(model, optimizer, manager, sync_every=9, **settings, fragment_update_alpha=alpha) as loop:
            for _ in range(6):
                steps = plain_steps(model, optimizer, 9)
                bases.append(manager.session.rv.base)
        manager.shutdown()
        return steps, bases, type(loop.diloco).__mro__[-2].__module__

    *theirs, module = trained("with")
    assert module == "torchft.local_sgd"
    forget_torchft(monkeypatch)
    *ours, module = trained("without")
    assert module == "diloco.outer.fragments.streaming"
    assert ours[1] == theirs[1] and all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert len(set(ours[1])) == 6, "θ moved in every round"


def test_the_progress_counts_inner_steps_over_rounds_and_the_parents(fresh: str) -> None:
    model, manager = Net(), MockManager(fresh, replicas=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    found = []
    with make_diloco(model, optimizer, manager, sync_every=3) as loop:
        for _ in range(5):
            found.append(loop.progress(before=0, steps=4))
            plain_steps(model, optimizer, 1)
        assert found == [{"global_step": n, "max_steps": 12} for n in range(5)]
        assert loop.progress(before=10, steps=4) == {"global_step": 35, "max_steps": 42}
        assert loop.progress(before=0, steps=1) == {"global_step": 5, "max_steps": 6}, "a run that --steps made longer"
    manager.shutdown()


@needs_torchft
def test_torchft_asks_for_the_eight_names_and_no_more(fresh: str) -> None:
    """If a torchft release asks for another name, or moves `_local_step`, this says so."""
    surface = {
        "_use_async_quorum", "start_quorum", "allreduce", "should_commit", "current_step",
        "register_state_dict_fn", "allow_state_dict_read", "disallow_state_dict_read",
    }  # fmt: skip
    asked: set[str] = set()

    class Recorder:
        def __init__(self, manager: StoreManager) -> None:
            self._manager = manager

        def __getattr__(self, name: str) -> Any:
            asked.add(name)
            return getattr(self._manager, name)

    model, manager = Net(), MockManager(fresh, replicas=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loop = make_diloco(model, optimizer, manager, sync_every=3)
    recorder = Recorder(manager)
    loop.diloco._manager = recorder  # type: ignore[assignment]
    for fragment in loop.diloco._fragments:
        fragment._manager = recorder  # type: ignore[assignment]
        fragment.register_state_dict_fn = lambda: None  # type: ignore[method-assign]
    with loop:
        plain_steps(model, optimizer, 6)
        assert loop.diloco._local_step == 0
    assert asked | {"_use_async_quorum", "register_state_dict_fn"} == surface
    manager.shutdown()


def test_a_model_without_anything_to_train_is_refused(fresh: str) -> None:
    model, manager = Net().requires_grad_(False), MockManager(fresh, replicas=1)
    with pytest.raises(OuterError, match="no trainable parameter"):
        make_diloco(model, torch.optim.SGD(model.parameters(), lr=0.1), manager, sync_every=6)
    manager.shutdown()


def test_another_model_under_the_same_url_is_refused(fresh: str) -> None:
    first, second = nn.Linear(4, 4), nn.Linear(5, 5)
    one = MockManager(fresh, replicas=2)
    with make_diloco(first, torch.optim.SGD(first.parameters(), lr=0.1), one, sync_every=6):
        pass
    two = MockManager(fresh, "r01")
    with (
        pytest.raises(WrongRun, match="parameters is"),
        make_diloco(second, torch.optim.SGD(second.parameters(), lr=0.1), two, sync_every=6),
    ):
        pass
    one.shutdown()
    two.shutdown()


def test_other_settings_under_the_same_url_are_refused(fresh: str) -> None:
    """A library run has no run.toml; its outer settings are a register all the same."""
    model = nn.Linear(4, 4)
    one = MockManager(fresh, replicas=2)
    with make_diloco(model, torch.optim.SGD(model.parameters(), lr=0.1), one, sync_every=6):
        pass
    two = MockManager(fresh, "r01")
    with (
        pytest.raises(WrongRun, match=r"outer.lr is 0.7 there, 0.5 here"),
        make_diloco(model, torch.optim.SGD(model.parameters(), lr=0.1), two, sync_every=6, outer_lr=0.5),
    ):
        pass
    with pytest.raises(ConfigError, match=r"started by a program of yours \(DiLoCoCallback, make_diloco\)"):
        _ = read_run(f"memory://{fresh}").config
    one.shutdown()
    two.shutdown()


@pytest.mark.parametrize(
    ("stats", "word"),
    [({"lr": 0.0}, "learning rate is 0"), ({"reward": 0.0, "grad_norm": 0.0}, "too hard or too easy"),
     ({"grad_norm": 0.0}, "all gradients are 0"), ({}, "optimizer")],
)  # fmt: skip
def test_likely_causes(stats: dict[str, float], word: str) -> None:
    assert word in likely_cause(stats)


# ---------------------------------------------------------------- when a sync is due


class Seconds:
    """Time that passes by one second with every inner step."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("seconds", "boundary", "fragments", "h"),
    [(None, 1, 1, 12), (5.0, 1, 1, 5), (0.1, 1, 1, 1), (99.0, 1, 1, 12),
     (5.0, 3, 1, 6), (4.0, 3, 1, 3), (0.1, 3, 1, 3), (2.0, 1, 2, 4)],  # F = 2: each fragment has its turn after 2 s
)  # fmt: skip
def test_a_sync_is_due_after_H_steps_or_some_seconds(
    fresh: str, monkeypatch: pytest.MonkeyPatch, seconds: float | None, boundary: int, fragments: int, h: int
) -> None:
    """The earlier limit ends a round, at the nearest boundary of a generation, after one inner step at least."""
    time = Seconds()
    monkeypatch.setattr("diloco.outer.loop.time", time)
    model, manager = Net(), MockManager(fresh, replicas=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: setattr(time, "now", time.now + 1.0))
    with make_diloco(
        model, optimizer, manager, sync_every=12, fragments=fragments, sync_seconds=seconds, boundary=boundary
    ):
        plain_steps(model, optimizer, 48)
    bodies = [manager.store.get(layout.commit_key(t)) for t in range(fragments - 1, manager.current_step())]
    assert {o.h for body in bodies if body for o in Commit.decode(body).offers} == {h}
    manager.shutdown()


def test_seconds_aside_are_no_seconds_of_inner_steps(fresh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Seconds()
    monkeypatch.setattr("diloco.outer.loop.time", time)
    model, manager = Net(), MockManager(fresh, replicas=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    with make_diloco(model, optimizer, manager, sync_every=12) as loop:
        began = manager.rounds.round_began
        with loop.aside():  # an evaluation, say
            time.now += 7.0
        assert manager.rounds.round_began == began + 7.0
        plain_steps(model, optimizer, 12)
    manager.shutdown()


def test_auto_lr_steps_by_the_likeness_of_the_means(fresh: str) -> None:
    """Alone, with a constant gradient: all means are parallel, so η stays at its careful end, target·(1−μ)."""
    model, manager = nn.Linear(4, 1, bias=False), MockManager(fresh, replicas=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_diloco(model, optimizer, manager, sync_every=2, outer_lr="auto", outer_momentum=0.5) as loop:
        for _ in range(20):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert loop.state.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.5)
    assert loop.mathematics()["lr"] == "auto"
    manager.shutdown()


@pytest.mark.parametrize(("delay", "alpha", "plain"), [(0, 0.0, False), (1, 0.5, False), (0, 0.0, True)])
def test_after_the_last_outer_step_the_model_is_what_was_committed(
    fresh: str, delay: int, alpha: float, plain: bool
) -> None:
    """Before: the model kept inner steps since the other fragment's last sync, so what a script saved was not θ.

    plain: one replica with a plain average, whose model is that of the script alone."""
    torch.manual_seed(0)
    model, alone = (nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)) for _ in range(2))
    alone.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, alone))
    outer = {"outer_lr": 1.0, "outer_momentum": 0.0} if plain else {"outer_lr": 0.5}
    manager = MockManager(fresh, steps=3)
    with make_diloco(
        model, optimizer, manager, sync_every=4, fragments=2, fragment_sync_delay=delay, fragment_update_alpha=alpha,
        **outer,
    ) as run:  # fmt: skip
        for _ in range(6):
            for one, steps in ((model, optimizer), (alone, other)):
                steps.zero_grad()
                one(torch.ones(1, 3)).sum().backward()
                steps.step()
        assert manager.done
        theta = dict(run.theta()).items()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True)) == plain
        assert all(torch.equal(value, dict(model.named_parameters())[name]) for name, value in theta) != plain


def test_theta_by_name_is_what_was_committed_not_what_the_model_holds(fresh: str) -> None:
    """With two fragments only one of them is written into the model at a sync; θ is of both, and not of inner steps."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False))
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    manager = MockManager(fresh, steps=9)
    with make_diloco(model, optimizer, manager, sync_every=4, fragments=2, outer_lr=1.0, outer_momentum=0.0) as run:
        for inner, committed in ((1, 0), (2, 1), (3, 1), (4, 2)):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            assert run.committed() == committed, inner
            theta = {name: value.clone() for name, value in run.theta()}
            assert {name: value.shape for name, value in theta.items()} == {n: p.shape for n, p in start.items()}
            if inner == 1:  # nothing is committed, though the model has learned
                assert all(torch.equal(theta[name], start[name]) for name in start)
                assert not torch.equal(theta["0.weight"], model[0].weight)
            if inner == 2:
                moved = [name for name in start if not torch.equal(theta[name], start[name])]
                assert moved == ["0.weight"]
