"""GRPO on several ranks: shards give what replicas give, and failures on one rank count on all."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from inner.settings.inner import InnerConfig
from inner.train.ranks import SHARDED
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support import rank_grpo
from tests.support.ranks import start_ranks, wait, words


def weights(folder: Path, placement: dict[str, Any], steps: int) -> tuple[torch.Tensor, bool, dict[str, float]]:
    folder.mkdir()
    config = InnerConfig(**{**SMALL, "batch_size": 8, "lr": 1e-4})
    act = partial(rank_grpo.train, config, str(small_folder()), str(folder / "told.pt"), placement, steps)
    assert wait(start_ranks(2, folder / "r00.log", act)) == 0, words(folder)
    return torch.load(folder / "told.pt")


@pytest.mark.slow
def test_shards_train_as_replicas_do(tmp_path: Path) -> None:
    """8 inner steps.  Each rank draws the same completions; gradients are summed in another order."""
    model = AutoModelForCausalLM.from_pretrained(small_folder())
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    replicated, is_sharded, told = weights(tmp_path / "replicated", {}, 8)
    sharded, in_shards, also = weights(tmp_path / "sharded", SHARDED, 8)
    assert in_shards and not is_sharded
    assert (sharded - replicated).norm() < 1e-3 * (replicated - start).norm()
    assert told["reward"] == also["reward"]


@pytest.mark.slow
def test_a_rank_in_shards_generates_without_the_others(tmp_path: Path) -> None:
    """Transformers lets the ranks of a model in shards wait for each other at each token."""
    act = partial(rank_grpo.generate_apart, InnerConfig(**SMALL), str(small_folder()), str(tmp_path / "told"))
    assert wait(start_ranks(2, tmp_path / "r00.log", act)) == 0, words(tmp_path)
    assert (tmp_path / "told").read_text() == "[0, 1]"
