"""SupervisedLoop: learns, reads three kinds of files, and its data is a pure function of (seed, step)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from inner.settings.inner import InnerConfig, InnerError, Seeds
from inner.train.build import build_inner, publish_model
from inner.usercode.check import check_data
from tests.support.tables import merge_tables

torch.set_num_threads(1)
TEXT = "the quick brown fox jumps over the lazy dog; " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tiny")
    publish_model(InnerConfig(loop="supervised", model="tiny", data={"text": "a.txt"}), where)
    (where / "a.txt").write_text(TEXT)
    return where


def build(folder: Path, seeds: Seeds | None = None, name: str = "a.txt", **settings: Any) -> Any:
    usual = {"batch_size": 4, "data": {"text": name, "context_length": 16}, "lr": 3e-3}
    config = InnerConfig(loop="supervised", model="tiny", **merge_tables(usual, settings))
    return build_inner(config, folder, {"text": folder / name}, seeds or Seeds(data=0, noise=0))


def after(n: int) -> Any:
    calls = iter(range(1, n + 1))
    return lambda: next(calls) == n


def weights(loop: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in loop.model.parameters()]).clone()


def test_the_loss_falls_and_pop_metrics_says_so(folder: Path) -> None:
    loop = build(folder)
    loop.train(after(5))
    first = loop.pop_metrics()
    loop.train(after(40))
    loop.pop_metrics()
    loop.train(after(5))
    last = loop.pop_metrics()
    assert first["samples"] == last["samples"] == 20
    assert first["lr"] == 3e-3 and first["grad_norm"] > 0
    assert 4 < first["loss"] < 6.5 and last["loss"] < 0.6 * first["loss"]
    assert loop.pop_metrics() == {"samples": 0}


def test_autocast_takes_products_in_bfloat16_and_keeps_float32_weights(folder: Path) -> None:
    losses = {}
    for autocast in ("off", "bfloat16"):
        loop = build(folder, autocast=autocast)
        loop.train(after(2))
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in loop.model.parameters())
        losses[autocast] = loop.pop_metrics()["loss"]
    assert 0 < abs(losses["bfloat16"] - losses["off"]) < 0.02


def test_accumulated_batches_make_the_same_step_as_one_large_batch(folder: Path) -> None:
    """GA = 2 on micro-batches 2i, 2i + 1: the gradient of their union."""
    loop = build(folder, Seeds(data=0, noise=0, start=3), gradient_accumulation_steps=2)
    rows = torch.cat([loop.batch(6), loop.batch(7)])
    logits = loop.model(input_ids=rows[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
    expected = torch.autograd.grad(loss, list(loop.model.parameters()))
    seen: list[torch.Tensor] = []
    loop.optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in loop.model.parameters()))
    loop.train(after(1))
    clip = min(1.0, 1.0 / float(torch.stack([g.norm() for g in expected]).norm()))
    for ours, reference in zip(seen, expected, strict=True):
        torch.testing.assert_close(ours, reference * clip, rtol=1e-3, atol=1e-6)
    assert loop.pop_metrics()["loss"] == pytest.approx(loss.item(), rel=1e-5)


def test_data_is_a_pure_function_of_seed_and_step(folder: Path) -> None:
    def seen(seeds: Seeds, steps: int) -> list[torch.Tensor]:
        loop = build(folder, seeds)
        found: list[torch.Tensor] = []
        original = loop.batch
        loop.batch = lambda micro: found.append(original(micro)) or found[-1]
        loop.train(after(steps))
        return found

    whole = seen(Seeds(data=3, noise=0), 5)
    later = seen(Seeds(data=3, noise=9, start=2), 3)
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], later, strict=True))
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0], seen(Seeds(data=4, noise=0), 1)[0])


def test_the_same_seeds_give_the_same_bits(folder: Path) -> None:
    ends = []
    for _ in range(2):
        loop = build(folder)
        loop.train(after(4))
        ends.append(weights(loop))
    assert torch.equal(*ends)


def test_what_a_hook_raises_leaves_train_unchanged(folder: Path) -> None:
    loop, error = build(folder), KeyError("mine")
    calls: list[int] = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise error

    loop.optimizer.register_step_post_hook(hook)
    with pytest.raises(KeyError) as caught:
        loop.train(after(9))
    assert caught.value is error and len(calls) == 2
    assert loop.pop_metrics()["samples"] == 8  # the step whose hook raised was made


def test_hooks_may_rewrite_the_parameters(folder: Path) -> None:
    loop = build(folder)

    def zero(*_: Any) -> None:
        with torch.no_grad():
            for parameter in loop.model.parameters():
                parameter.zero_()

    loop.optimizer.register_step_post_hook(zero)
    loop.train(after(1))
    loop.pop_metrics()
    loop.train(after(1))
    assert loop.pop_metrics()["loss"] == pytest.approx(np.log(257), rel=1e-5)  # a zero model is uniform over 257 tokens


def test_token_files_give_the_same_training_as_the_text(folder: Path) -> None:
    ids = np.frombuffer(TEXT.encode(), dtype=np.uint8)
    np.save(folder / "a.npy", ids.astype(np.int32))
    ids.astype(np.uint16).tofile(folder / "a.bin")
    ends = []
    for name in ("a.txt", "a.npy", "a.bin"):
        loop = build(folder, name=name)
        loop.train(after(2))
        ends.append(weights(loop))
    assert torch.equal(ends[0], ends[1]) and torch.equal(ends[0], ends[2])


def test_bad_texts_are_refused(folder: Path) -> None:
    (folder / "short.txt").write_text("tiny")
    with pytest.raises(InnerError, match=r"4 tokens.*lower inner\.data\.context_length"):
        build(folder, name="short.txt")
    np.save(folder / "large.npy", np.full(99, 300))
    with pytest.raises(InnerError, match="0 to 256"):
        build(folder, name="large.npy")
    np.save(folder / "float.npy", np.zeros(99))
    with pytest.raises(InnerError, match="integers in one dimension"):
        build(folder, name="float.npy")
    (folder / "odd.bin").write_bytes(b"abc")
    (folder / "torn.npy").write_bytes(b"\x93NUMPY\x01\x00")
    for name in ("odd.bin", "torn.npy"):  # before the start, and in a replica
        config = InnerConfig(loop="supervised", model="tiny", data={"text": name})
        with pytest.raises(InnerError, match=r"is not a file of token ids.*two bytes per token"):
            check_data(config, {"text": folder / name})
        with pytest.raises(InnerError, match=r"is not a file of token ids.*two bytes per token"):
            build(folder, name=name)
    with pytest.raises(InnerError, match="could not be loaded"):
        config = InnerConfig(loop="supervised", model="tiny", data={"text": "a.txt"})
        build_inner(config, folder / "nothing", {"text": folder / "a.txt"}, Seeds(data=0, noise=0))
