"""Models that flat vectors cannot hold are refused, or noticed at the next sync; and the places where a run may lie."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diloco import StoreManager, make_diloco
from diloco.outer.flat import ModelGuard, check_model
from diloco.outer.frozen import frozen_digest
from diloco.run.config import ConfigError, OuterError
from diloco.run.founding import refuse_nested
from rendezvous.errors import WrongRun
from rendezvous.stores.open import open_store, urls_above
from tests.support.absent import forget_torchft


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.ParameterDict({"w": nn.Parameter(torch.zeros(2, dtype=torch.complex64))}), "w hold complex numbers"),
        (nn.Linear(2, 2).half(), "weight, bias are trained in float16"),
        (nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), "1 keep running statistics"),
        (nn.Sequential(nn.Conv2d(1, 1, 1), nn.SyncBatchNorm(1)), "1 keep running statistics"),
    ],
)
def test_a_model_that_vectors_cannot_hold_is_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(OuterError, match=words):
        make_diloco(model, sgd(model), StoreManager("memory://refused", timing=None), sync_every=2)


def test_statistics_that_do_not_move_are_no_reason() -> None:
    still = [nn.BatchNorm1d(2, track_running_stats=False), nn.BatchNorm1d(2).eval(), nn.GroupNorm(1, 2)]
    for norm in still:
        model = nn.Sequential(nn.Linear(2, 2), norm)
        check_model(model, sgd(model))


def test_two_optimizers_for_one_model_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    with pytest.raises(OuterError, match=r"does not hold 1.weight, 1.bias, which can be trained"):
        check_model(model, sgd(model[0]))
    model[1].requires_grad_(False)
    check_model(model, sgd(model[0]))


def test_a_schedule_free_optimizer_is_refused() -> None:
    """Before: its second set of weights stayed where it was, and drew the parameters back after each outer step."""
    model = nn.Linear(2, 1)
    optimizer: Any = sgd(model)
    optimizer.train = optimizer.eval = lambda: None
    with pytest.raises(OuterError, match=r"SGD has an eval\(\), as schedule-free optimizers have"):
        check_model(model, optimizer)


@pytest.mark.parametrize("torchft", [True, False])
def test_one_manager_drives_one_loop(torchft: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: on a machine without torchft, two loops took each other's steps."""
    if not torchft:
        forget_torchft(monkeypatch)
    manager = StoreManager(f"memory://two-loops-{torchft}", replicas=1, min_replicas=1)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    with (
        make_diloco(first, sgd(first), manager, sync_every=2),
        pytest.raises(ValueError, match="Make a new manager for each"),
    ):
        make_diloco(second, sgd(second), manager, sync_every=2)


def guarded(model: nn.Module, change: Any) -> str:
    guard = ModelGuard(model)
    guard.check()
    change()
    try:
        guard.check()
    except OuterError as error:
        return str(error)
    return ""


def test_late_unfreezing_freezing_and_replacing_are_noticed() -> None:
    def net() -> Any:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[1].weight.requires_grad_(False)
        return model

    model = net()
    assert "1.weight were frozen, unfrozen or replaced" in guarded(model, lambda: model[1].weight.requires_grad_(True))
    model = net()
    assert "0.bias were" in guarded(model, lambda: model[0].bias.requires_grad_(False))
    model = net()
    assert "0.weight were" in guarded(model, lambda: setattr(model[0], "weight", nn.Parameter(torch.zeros(2, 2))))
    model = net()
    assert guarded(model, lambda: model[0].weight.data.zero_()) == "", "training changes values"


def test_buffers_that_training_moves_are_noticed() -> None:
    model: Any = nn.Linear(2, 2)
    model.register_buffer("routed", torch.zeros(4))
    model.register_buffer("cache", torch.zeros(4), persistent=False)
    assert guarded(model, lambda: model.cache.add_(1)) == ""
    assert "the buffers routed changed during training" in guarded(model, lambda: model.routed.add_(1))
    assert "the buffers routed" in guarded(model, lambda: setattr(model, "routed", torch.ones(4)))


def test_a_moved_buffer_ends_the_loop_before_anything_is_offered() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.calls: torch.Tensor
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.calls.add_(1)
            return super().forward(input)

    model = Counting()
    optimizer, manager = sgd(model), StoreManager("memory://buffers", replicas=1, min_replicas=1)
    with pytest.raises(OuterError, match="the buffers calls"), make_diloco(model, optimizer, manager, sync_every=2):
        for _ in range(2):
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    assert manager.store.list("steps/") == []


def test_replicas_with_other_frozen_weights_do_not_meet() -> None:
    def adapter(seed: int) -> nn.Sequential:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        model[0].requires_grad_(False)
        return model

    assert frozen_digest(adapter(0)) == frozen_digest(adapter(0)) != frozen_digest(adapter(1))
    assert frozen_digest(nn.Linear(2, 2)) == ""
    model = adapter(0)
    with make_diloco(model, sgd(model[1]), StoreManager("memory://frozen", "r00", replicas=2), sync_every=2):
        other = adapter(1)
        with pytest.raises(WrongRun, match="frozen weights is"):
            make_diloco(other, sgd(other[1]), StoreManager("memory://frozen", "r01"), sync_every=2).__enter__()


def test_the_library_keeps_a_window_if_asked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fleet.keep = 'some' is not known. Use a size"):
        StoreManager(str(tmp_path / "x"), keep="some")
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    manager = StoreManager(str(tmp_path / "run"), replicas=1, min_replicas=1, steps=12, keep="window")
    with make_diloco(model, optimizer, manager, sync_every=1, snapshot_every=2):
        while not manager.done:
            model(torch.ones(2)).sum().backward()
            optimizer.step()
    manager.shutdown()
    kept = [k for k in open_store(str(tmp_path / "run")).list("snapshots/") if k.endswith(".safetensors")]
    assert 1 <= len(kept) <= 3, kept


# ---------------------------------------------------------------------- where a run may lie


@pytest.mark.parametrize(
    ("url", "above"),
    [
        ("s3://b/x/y?region=r", ["s3://b/x?region=r", "s3://b?region=r"]),
        ("s3://b", []),
        ("hf://buckets/me/b/x/y", ["hf://buckets/me/b/x", "hf://buckets/me/b"]),
        ("memory://x/y", []),
        ("/a/b/c", ["/a/b", "/a"]),
        ("file:///a/b", ["/a"]),
    ],
)
def test_the_places_that_a_url_lies_in(url: str, above: list[str]) -> None:
    assert urls_above(url) == above


def test_a_run_inside_a_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outer").mkdir()
    (tmp_path / "outer" / "run.json").write_text("{}")
    refuse_nested(str(tmp_path / "beside"))
    with pytest.raises(WrongRun, match=r"is inside the run at .*outer: .* Use a URL beside"):
        refuse_nested(str(tmp_path / "outer" / "steps" / "inner"))
    model = nn.Linear(2, 2)
    with pytest.raises(WrongRun, match="is inside the run"):
        manager = StoreManager(str(tmp_path / "outer" / "mine"), replicas=1, min_replicas=1)
        make_diloco(model, sgd(model), manager, sync_every=2).__enter__()
    assert {p.name for p in tmp_path.iterdir()} == {"outer"}, "looking has made nothing"
