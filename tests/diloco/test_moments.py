"""AdamW's moments, bit by bit, from a replica that leaves with notice to the next session of its slot; else none."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from diloco import StoreManager, make_diloco
from diloco.outer.moments import MOST_BYTES, read_moments, write_moments
from diloco.process.exitcodes import LEFT
from rendezvous import layout
from rendezvous.records.digests import digest
from rendezvous.records.records import Leave
from rendezvous.records.tensors import TensorFile
from tests.diloco.test_outer_safety import events
from tests.support.fleet import ENDLESS, WAIT_S, Fleet

LORA = {"r": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"]}


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2, dtype=torch.bfloat16))
    model[0].bias.requires_grad_(False)
    return model


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if p.requires_grad else None
        optimizer.step()


def trained(steps: int = 3, kind: Any = torch.optim.AdamW, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = small_model()
    optimizer = kind([p for p in model.parameters() if p.requires_grad], lr=1e-2, **settings)
    take_steps(model, optimizer, steps, seed=1)
    return model, optimizer


def test_a_successor_goes_on_in_the_same_bits() -> None:
    model, optimizer = trained()
    successor, fresh = trained(0)
    successor.load_state_dict(model.state_dict())
    assert write_moments(successor, fresh, read_moments(model, optimizer)) == ""
    for each in ((model, optimizer), (successor, fresh)):
        take_steps(*each, steps=2, seed=2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), successor.parameters(), strict=True))


@pytest.mark.parametrize(("kernel", "place"), [("fused", "meta"), ("capturable", "meta"), ("foreach", "cpu")])
def test_the_number_of_steps_lies_where_torch_keeps_it(kernel: str, place: str) -> None:
    """A kernel that counts on the GPU takes no number on the CPU; `meta` stands for a GPU here."""
    found = read_moments(*trained())
    model = small_model().to("meta")
    first, *others = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others, kernel: True}], lr=1e-2)
    assert write_moments(model, optimizer, found) == ""
    steps = [optimizer.state[p]["step"] for p in (first, *others)]
    assert [step.device.type for step in steps] == ["cpu", *[place] * len(others)]
    assert {step.dtype for step in steps} == {torch.float32}


def test_there_is_nothing_to_hand_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step, of another optimizer, with another state, and where they are many bytes."""
    assert read_moments(*trained(0)) == {}
    assert read_moments(*trained(kind=torch.optim.SGD, momentum=0.9)) == {}
    assert read_moments(*trained(amsgrad=True)) == {}
    assert MOST_BYTES > 8 * 5_000_000, "those of an adapter of SmolLM2"
    monkeypatch.setattr("diloco.outer.moments.MOST_BYTES", 100)
    assert read_moments(*trained()) == {}


def spoiled(**changes: Any) -> dict[str, np.ndarray]:
    return {**read_moments(*trained()), **changes}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({}, "shapes"),
        (spoiled(exp_avg=np.zeros(5, np.float32)), "shapes"),
        (spoiled(more=np.zeros(5, np.float32)), "shapes"),
        (spoiled(exp_avg=np.full(26, np.nan, np.float32)), "not finite"),
        (spoiled(exp_avg=np.zeros(26, np.int32)), "not finite fp32"),
        (spoiled(exp_avg_sq=np.full(26, -1, np.float32)), "below 0"),
        (spoiled(step=np.zeros(5, np.float32)), "below 1"),
    ],
)
def test_what_cannot_be_its_moments_is_refused_and_changes_nothing(found: dict[str, np.ndarray], words: str) -> None:
    model, optimizer = trained(0)
    assert words in write_moments(model, optimizer, found) and not optimizer.state
    assert "this optimizer is SGD" in write_moments(*trained(kind=torch.optim.SGD), read_moments(*trained()))


def session(url: Path, steps: int) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A session that takes so many inner steps and leaves; -> moments as it began, and as it left."""
    model, optimizer = trained(0)
    manager = StoreManager(str(url), replicas=1, min_replicas=1, steps=9)
    began: dict[str, np.ndarray] = {}
    with make_diloco(model, optimizer, manager, sync_every=2):
        began = read_moments(model, optimizer)
        take_steps(model, optimizer, steps, seed=3)
    return began, read_moments(model, optimizer)


def test_the_next_session_of_a_slot_begins_with_the_moments_of_the_last(tmp_path: Path) -> None:
    first, left = session(tmp_path, steps=3)
    found, later = session(tmp_path, steps=1)
    assert first == {} and all(np.array_equal(found[kind], left[kind]) for kind in left) and set(found) == set(left)
    assert set(found["step"]) == {3} and set(later["step"]) == {4}
    assert not list((tmp_path / "residuals").glob("*")), "used once; 2 uploaded nothing, so its rate is not known"


@pytest.mark.parametrize("whole", [False, True])
def test_moments_that_are_none_are_refused_with_a_word_and_training_goes_on_fresh(tmp_path: Path, whole: bool) -> None:
    """Other bytes than the digest says, and bytes with the digest that are no moments of this model."""
    session(tmp_path, steps=3)
    (blob,) = (tmp_path / "residuals").glob("*")
    if whole:
        leave = Leave.decode((tmp_path / layout.leave_key("r00", 1)).read_bytes())
        body = bytes(TensorFile({"own.step": np.ones(5, np.float32)}))
        record = replace(leave, residual_digest=digest(body))
        (tmp_path / layout.leave_key("r00", 1)).write_bytes(record.encode())
        blob.write_bytes(body)
    else:
        blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    found, later = session(tmp_path, steps=1)
    assert found == {} and set(later["step"]) == {1}
    lines = "".join(path.read_text() for path in tmp_path.glob("log/*/*.jsonl"))
    assert ("moments of the session before: they have the shapes" if whole else "start from zero") in lines


# ---------------------------------------------------------------------- a fleet


def start_again(fleet: Fleet) -> None:
    """r01, until it has counted."""
    fleet.start("r01")
    fleet.wait_for(lambda: fleet.counted("r01", len(fleet.sessions["r01"])))


def end(fleet: Fleet, number: signal.Signals) -> None:
    fleet.signal("r01", number)
    fleet.sessions["r01"][-1].join(WAIT_S)


@pytest.mark.slow
def test_a_leave_record_hands_moments_over_a_kill_does_not_and_a_damaged_blob_is_refused(tmp_path: Path) -> None:
    fleet = Fleet(
        tmp_path, inner={"lora": LORA, "lr": 1e-2}, fleet={"replicas": 2, "steps": ENDLESS, "min_replicas": 1}
    )
    fleet.start("r00")
    start_again(fleet)
    end(fleet, signal.SIGTERM)
    start_again(fleet)
    end(fleet, signal.SIGKILL)
    start_again(fleet)
    end(fleet, signal.SIGTERM)
    (blob,) = (tmp_path / "run" / "residuals").glob("*")
    blob.write_bytes(blob.read_bytes()[:-1] + b"?")
    start_again(fleet)
    fleet.end_in(1)
    assert fleet.wait() == {"r00": [0], "r01": [LEFT, -9, LEFT, 0]}, fleet.logs()
    left, taken = events(fleet, "moments_left"), events(fleet, "moments_taken")
    assert [e["digest"] for e in taken] == [left[0]["digest"]] != [left[1]["digest"]] and len(left) == 2
    (bad,) = events(fleet, "bad_residual")
    assert "missing or damaged; codec and optimizer start from zero" in bad["text"]
