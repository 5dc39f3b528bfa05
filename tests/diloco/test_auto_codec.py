"""codec = "auto": chosen once, by the founder of the run, with a reason; the same run for later launches with it."""

from pathlib import Path
from typing import Any

import pytest

from diloco.run import founding, sizing
from diloco.run.config import load_config
from diloco.run.founding import open_run
from diloco.run.library import agree_on_run
from diloco.run.record import read_run
from executors.cli import main as cli
from rendezvous import layout
from rendezvous.clock import SystemClock
from rendezvous.errors import WrongRun
from rendezvous.store import put_once
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import Fault, FaultyStore, ManualClock

INNER = '[inner]\nloop = "supervised"\nmodel = "tiny"\ndata.text = "text.txt"\n'
LAYOUT: list[list[Any]] = [["w", [500, 200], "float32"]]
SLOW, FAST = (1e5, 1e5), (1e9, 1e9)  # bytes per second, up and down


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The measured throughput of the store; the last entry counts."""
    rates = [SLOW]
    monkeypatch.setattr(sizing, "measure_throughput", lambda store, clock, size: rates[-1])
    return rates


def config(folder: Path, codec: str) -> Any:
    (folder / "text.txt").write_text("one two three " * 50)
    (folder / "run.toml").write_text(f'[outer]\ncodec = "{codec}"\n{INNER}')
    return load_config(folder / "run.toml")


def founded(folder: Path, codec: str) -> Any:
    return open_run(config(folder, codec), str(folder / "run"), SystemClock())


def test_the_founder_chooses_and_run_json_says_what_and_why(tmp_path: Path, link: list[Any]) -> None:
    run = founded(tmp_path, "auto")
    assert run.config.outer.codec == run.config.outer.rules.codec == "topk"
    for words in ("0.1 M parameters, 3 replicas", "0 MB/s up", "of the 1.0 s between syncs", "is a guess"):
        assert words in run.record.why_codec
    assert read_run(run.url).record == run.record


@pytest.mark.parametrize("later", ["auto", "topk"])
def test_a_later_command_is_the_same_run_whatever_it_would_choose(tmp_path: Path, link: list[Any], later: str) -> None:
    first = founded(tmp_path, "auto")
    link.append(FAST)
    again = founded(tmp_path, later)
    assert again.resumed and again.record == first.record


def test_another_codec_by_name_is_another_run(tmp_path: Path, link: list[Any]) -> None:
    founded(tmp_path, "auto")
    with pytest.raises(WrongRun, match=r"outer\.codec is 'topk' there, 'fp32' here"):
        founded(tmp_path, "fp32")


def test_auto_goes_on_with_a_codec_that_somebody_named(tmp_path: Path, link: list[Any]) -> None:
    founded(tmp_path, "bf16")
    assert founded(tmp_path, "auto").config.outer.codec == "bf16"


def test_a_fast_store_needs_no_codec(tmp_path: Path) -> None:
    """Really measured, and nothing is left of it."""
    run = founded(tmp_path, "auto")
    assert run.config.outer.codec == "fp32"
    assert list((tmp_path / "run").glob("probe/*/*")) == []


def test_two_found_at_once_and_both_go_by_the_first(link: list[Any]) -> None:
    """The other one's run.json comes between our look and our write; we had chosen something else."""
    clock, rival = ManualClock(), MemoryStore()
    link.append(FAST)
    agree_on_run(rival, clock, {"codec": "auto", "sync_every": 10}, LAYOUT, replicas=3)
    link.append(SLOW)
    inner = MemoryStore()
    between = Fault("create", "run.json", None, before=lambda: inner.put(layout.RUN, rival.get(layout.RUN) or b""))
    stands = agree_on_run(FaultyStore(inner, [between]), clock, {"codec": "auto", "sync_every": 10}, LAYOUT, replicas=3)
    assert stands.codec == "fp32"


def test_a_library_run_resolves_it_too(link: list[Any]) -> None:
    store, clock = MemoryStore(), ManualClock()
    first = agree_on_run(store, clock, {"codec": "auto", "sync_every": 10}, LAYOUT, replicas=3)
    assert first.codec == "topk" and "0.1 M parameters, 3 replicas" in first.why_codec
    assert agree_on_run(store, clock, {"codec": "topk", "sync_every": 10}, LAYOUT) == first
    with pytest.raises(WrongRun, match="'topk' there, 'int8' here"):
        agree_on_run(store, clock, {"codec": "int8", "sync_every": 10}, LAYOUT)


def test_a_model_that_cannot_be_counted_asks_for_a_name(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    config(tmp_path, "auto")
    text = (tmp_path / "run.toml").read_text().replace('"tiny"', f'"{empty}"')
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(founding.ConfigError, match="or name a codec instead of auto"):
        open_run(load_config(tmp_path / "run.toml"), str(tmp_path / "run"), SystemClock())


def test_the_doctor_says_what_it_would_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config(tmp_path, "auto")
    assert cli.main(["doctor", "memory://auto", "--config", str(tmp_path / "run.toml")]) == 0
    out = capsys.readouterr().out
    assert "3 replicas, fp32, direct" in out and "codec = auto would be" in out and "fp32: fp32 syncs in" in out
    config(tmp_path, "int8")
    assert cli.main(["doctor", "memory://auto", "--config", str(tmp_path / "run.toml")]) == 0
    out = capsys.readouterr().out
    assert "3 replicas, int8, direct" in out and "fp32: fp32 syncs in" in out, "its own is what a sync is told of"


def test_a_run_of_make_diloco_with_auto(link: list[Any], tmp_path: Path) -> None:
    """The manager asks, and its encoder is the one that was chosen."""
    import torch

    from diloco.outer.make import make_diloco
    from diloco.outer.managers.manager import StoreManager

    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = StoreManager(str(tmp_path), replicas=1, steps=2, min_replicas=1)
    with make_diloco(model, optimizer, manager, sync_every=2, codec="auto"):
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
    assert manager.session.rv.rules.codec == "fp32", "one replica exchanges nothing"
    assert put_once(manager.store, SystemClock(), layout.RUN, b"")[0] is False
    assert '"codec":"fp32"' in (tmp_path / "run.json").read_text()
