"""The distillation and the pairs on several ranks: two ranks are one process with twice the batch."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.rank_channels import Told, trained, write_pairs


def test_two_ranks_have_the_gradients_of_one_process_with_twice_the_batch(tmp_path: Path) -> None:
    sdpo = {"sdpo": {"weight": 0.5}}
    one = trained(tmp_path / "one", 1, **sdpo)
    two = trained(tmp_path / "two", 2, **sdpo)
    print(one["lessons"], two["lessons"], one["metrics"], two["metrics"])
    for a, b in zip(one["gradients"], two["gradients"], strict=True):
        print(a.norm(), (a - b).norm() / a.norm())
    assert 0
