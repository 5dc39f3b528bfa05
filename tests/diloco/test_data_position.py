"""A replacement goes on in its slot's data after the work that the chain counts, at any round length."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from diloco.outer.make import make_diloco
from diloco.outer.managers.manager import MockManager
from diloco.process.data_position import counted_inner_steps, farthest, read_offers
from diloco.run.config import OuterConfig
from rendezvous import layout
from rendezvous.background import in_turn
from rendezvous.records.records import Listed
from tests.diloco.test_outer import Net, Seconds, plain_steps


@pytest.fixture
def fresh() -> Iterator[str]:
    yield f"position-{np.random.default_rng().integers(1 << 60)}"


def offers(*found: tuple[int, int, int]) -> list[Listed]:
    """(outer step, generation, h)."""
    blob = layout.delta_blob(0, "r00", 1, "n")
    return [Listed(t, "r00", generation, "n", blob, 1, "d", h, 1.0) for t, generation, h in found]


def test_of_one_fragment_it_is_the_sum_of_the_counted_steps() -> None:
    assert counted_inner_steps(offers(), OuterConfig()) == 0
    assert counted_inner_steps(offers((0, 1, 100), (2, 1, 60), (3, 2, 100)), OuterConfig()) == 260
    one, other = offers((0, 1, 8)), offers((0, 1, 8), (1, 1, 5))
    assert farthest({"r00": one, "r01": other}, OuterConfig()) == 13 and farthest({}, OuterConfig()) == 0


@pytest.mark.parametrize(
    ("settings", "steps", "last_offer"),
    [
        ({"sync_every": 6}, 20, 18),
        ({"sync_every": 6, "fragment_sync_delay": 2}, 19, 16),
        ({"sync_every": 6, "fragment_sync_delay": 2, "fragment_update_alpha": 0.5}, 19, 16),
        ({"sync_every": 6, "fragments": 3}, 21, 20),
        ({"sync_every": 6, "fragments": 3, "fragment_sync_delay": 1}, 20, 19),
        ({"sync_every": 600, "sync_seconds": 5.0}, 12, 10),
    ],
)
def test_sessions_one_after_the_other_go_on_at_the_last_offer_that_counts(
    fresh: str, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], steps: int, last_offer: int
) -> None:
    """The steps behind a session's last offer are lost with it, and so its rows are read again."""
    time, outer = Seconds(), OuterConfig(**settings)
    monkeypatch.setattr("diloco.outer.loop.time", time)
    named = {"outer_lr": 0.7, **settings}
    for session in (1, 2):
        torch.manual_seed(0)  # the frozen weights of a run are its own
        model, manager = Net(), MockManager(fresh, replicas=1)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        optimizer.register_step_post_hook(lambda *_: setattr(time, "now", time.now + 1.0))
        with make_diloco(model, optimizer, manager, **named):
            plain_steps(model, optimizer, steps)
        manager.shutdown()
        head = manager.session.rv.step
        of_slot = read_offers(manager.store, head, in_turn)[manager.session.rv.slot]
        assert {o.generation for o in of_slot} == set(range(1, session + 1))
        assert counted_inner_steps(of_slot, outer) == session * last_offer


def test_a_commit_that_is_gone_is_no_reason_to_end(fresh: str) -> None:
    model, manager = Net(), MockManager(fresh, replicas=1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
    with make_diloco(model, optimizer, manager, sync_every=3):
        plain_steps(model, optimizer, 12)
    manager.shutdown()
    manager.store.delete([layout.commit_key(1)])
    assert counted_inner_steps(read_offers(manager.store, 4, in_turn)["r00"], OuterConfig()) == 9
