"""A replica that joins where a snapshot stands takes nothing of θ₀'s weights; one that compares with θ₀ does."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from diloco.model.fetch import fetch_model
from diloco.model.start_model import has_more_than_trained
from diloco.model.zeros import fetch_model_without_weights, write_zeros
from diloco.outer.flat import layout_of
from diloco.replica.replica import ZEROS, Inputs, _fetch_inputs, build_loop
from inner import InnerConfig, Seeds
from inner.train.build import load_start
from rendezvous import layout
from rendezvous.agreement.chain import first_open_step
from tests.support.audit import check_run
from tests.support.fakes import FaultyStore
from tests.support.fleet import Fleet
from tests.support.fleet import config as config_of
from tests.support.tiny_models import tiny_model_folder


def weights_of(fleet: Fleet) -> set[str]:
    return {stored["key"] for name, stored in fleet.model.files.items() if name.endswith(".safetensors")}


def fetched_weights(fleet: Fleet, folder: Path, compares: bool = False) -> tuple[Path, set[str]]:
    """-> the folder that a replica gets which starts now, and the keys of weights that it asked for."""
    store = FaultyStore(fleet.run.store)
    config: Any = SimpleNamespace(rendezvous="bucket", inner=SimpleNamespace(compares_with_start=compares, lora=None))
    run: Any = SimpleNamespace(store=store, config=config, record=fleet.run.record)
    session: Any = None  # only a model on the Hub needs one
    folder.mkdir(exist_ok=True)
    found, _ = _fetch_inputs(run, fleet.model, folder, session)
    return found, {key for verb, key in store.calls if verb == "get"} & weights_of(fleet)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    """Two replicas have taken eight steps; a third one has joined after four, when θ₀ could not be read any more."""
    folder = tmp_path_factory.mktemp("fleet")
    fleet = Fleet(folder, outer={"sync_every": 20}, fleet={"steps": 10, "min_replicas": 2, "keep": "all"})
    kept = {key: fleet.store.get(key) or b"" for key in weights_of(fleet)}
    for slot in ("r00", "r01"):
        fleet.start(slot)
    fleet.wait_for(lambda: fleet.commit(3) and fleet.store.get(layout.snapshot_key(2)))
    fleet.store.delete([*kept])
    fleet.start("r02")
    assert fleet.wait() == {"r00": [0], "r01": [0], "r02": [0]}, fleet.logs()
    for key, body in kept.items():
        fleet.store.put(key, body)
    return fleet


def test_a_replica_joins_without_the_start_models_weights_and_agrees(fleet: Fleet) -> None:
    check_run(fleet.folder / "run", 10)  # every digest that every replica has logged
    assert any(o.slot == "r02" for c in fleet.commits() for o in c.offers)


def test_no_weights_are_asked_for_where_a_snapshot_stands(fleet: Fleet, tmp_path: Path) -> None:
    found, asked = fetched_weights(fleet, tmp_path)
    assert not asked and found.name == ZEROS and first_open_step(fleet.store) == 10


def test_a_loss_that_compares_with_the_start_asks_for_its_weights(fleet: Fleet, tmp_path: Path) -> None:
    found, asked = fetched_weights(fleet, tmp_path, compares=True)
    assert asked == weights_of(fleet) and found.name != ZEROS


def test_without_a_snapshot_the_weights_are_asked_for(tmp_path: Path) -> None:
    fresh = Fleet(tmp_path)
    _, asked = fetched_weights(fresh, tmp_path / "scratch")
    assert asked == weights_of(fresh)


def test_a_model_of_zeros_has_all_that_is_not_trained(fleet: Fleet, tmp_path: Path) -> None:
    whole, _ = load_start(fetch_model(fleet.store, fleet.model, tmp_path / "model"), "float32")
    zeros, missing = load_start(fetch_model_without_weights(fleet.store, fleet.model, tmp_path / ZEROS), "float32")
    assert not missing and not has_more_than_trained(zeros) and zeros.training == whole.training
    assert zeros.generation_config.to_dict() == whole.generation_config.to_dict()  # type: ignore[union-attr]
    buffers = dict(zeros.named_buffers())
    assert all(torch.equal(b, buffers[name]) for name, b in whole.named_buffers())
    assert [n for n, _ in zeros.named_parameters()] == [n for n, _ in whole.named_parameters()]
    assert all(p.count_nonzero() == 1 for p in zeros.parameters()), "the mark, by which no two arrays are equal"


def test_an_untied_head_stays_untied_in_a_model_of_zeros(tmp_path: Path) -> None:
    """Before: config.json says that the head is tied, and the files have another one. Transformers keeps both, but it
    tied the two arrays of zeros, and a replica that joined later was refused for its parameter layout."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    parameters = layout_of(load_start(folder, "float32")[0])
    assert "lm_head.weight" in {name for name, *_ in parameters}
    for dtype in ("float32", "bfloat16", "float16"):
        write_zeros(folder / "model.safetensors", [[name, shape, dtype] for name, shape, _ in parameters])
        assert layout_of(load_start(folder, "float32")[0]) == parameters


def test_a_model_with_frozen_weights_gets_them_after_all(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = list[str]()

    def build(config: object, folder: Path, *rest: object, **named: object) -> Any:
        model, _ = load_start(folder, "float32")
        next(model.parameters()).requires_grad_(False)
        built.append(folder.name)
        return SimpleNamespace(model=model)

    monkeypatch.setattr("inner.build_inner", build)
    session: Any = None  # only a model on the Hub needs one
    zeros = fetch_model_without_weights(fleet.store, fleet.model, tmp_path / ZEROS)
    loop, folder = build_loop(fleet.run, session, fleet.model, Inputs(zeros, {}, tmp_path), Seeds(1, 2))
    assert built == [ZEROS, "model"] and folder.name == "model"
    assert all(p.any() for n, p in loop.model.named_parameters() if n.endswith("proj.weight"))


@pytest.mark.parametrize(
    ("settings", "compares"),
    [({}, False), ({"sdpo": {"weight": 0.1}}, False), ({"sdpo": {"weight": 0.1, "teacher": "frozen"}}, True),
     ({"replay": {"weight": 0.1, "pairs": "pairs.jsonl"}}, True)],
)  # fmt: skip
def test_a_reference_and_a_frozen_teacher_are_the_start_model(settings: dict[str, Any], compares: bool) -> None:
    assert InnerConfig(**settings).compares_with_start is compares


def test_a_supervised_loop_does_not_compare_with_its_start(tmp_path: Path) -> None:
    assert not config_of(tmp_path).inner.compares_with_start
