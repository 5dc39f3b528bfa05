"""`diloco export RUN --push OWNER/NAME`: a folder with a card, as one commit of the Hub, by the real client."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from executors.cli.main import main
from executors.cli.writing.exported import MARK
from tests.support.hub_writer import HubWriter
from tests.support.puppets import PuppetRun


@pytest.fixture
def run(tmp_path: Path) -> PuppetRun:
    found = PuppetRun(tmp_path)
    found.rounds(3)
    return found


def export(run: PuppetRun, folder: Path, *more: str) -> int:
    return main(["export", run.url, "--to", str(folder), "--push", "me/learned", *more])


def test_a_dry_run_writes_a_folder_whose_card_says_what_the_run_was(
    run: PuppetRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(run, tmp_path / "out", "--dry-run") == 0
    assert "nothing was pushed" in capsys.readouterr().out
    assert {"model.safetensors", "README.md", "report.html"} <= {p.name for p in (tmp_path / "out").iterdir()}
    front, _, card = (tmp_path / "out" / "README.md").read_text().removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(front) == {"library_name": "transformers", "tags": ["serverless-diloco", "diloco", "trl"]}
    assert "3 of 100 outer steps" in card and "| outer step | 3 of 100 |" in card and "$0.00" in card
    assert "| digest of the weights | `unknown`" in card, "puppets write no log"


def test_the_folder_is_one_commit_of_a_private_repository(
    run: PuppetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with HubWriter() as hub:
        point_at(hub, monkeypatch)
        assert export(run, tmp_path / "out", "--json") == 0
        assert json.loads(capsys.readouterr().out)["pushed"].startswith(f"{hub.url}/me/learned")
        assert hub.private == {"me/learned": True}
        here = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file() and p.name != MARK}
        assert hub.repos["me/learned"] == here
        assert export(run, tmp_path / "again", "--public") == 0 and hub.private == {"me/learned": True}


@pytest.mark.slow
def test_the_users_own_files_are_not_uploaded_and_old_weights_go(
    run: PuppetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: `.env` in the folder went to the Hub, and an adapter of an earlier push stayed beside the model."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".env").write_text("KEY=s3cret")
    with HubWriter() as hub:
        point_at(hub, monkeypatch)
        hub.repos["me/learned"] = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"", "mine.md": b""}
        assert export(run, tmp_path / "out") == 0
        found = set(hub.repos["me/learned"])
    assert {"model.safetensors", "README.md", "mine.md"} <= found
    assert not found & {".env", MARK, "adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.slow
def test_only_files_that_an_export_writes_are_deleted(
    run: PuppetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before: `*` matched `/`, so `model*.safetensors` deleted the user's models/other.safetensors."""
    mine = (
        "models/other.safetensors", "model_v1/weights.safetensors", "adapter_notes.md", "model-gguf/q4.safetensors",
        "a/adapter_config.json", "model-00001-of-00002/x.safetensors", "old/model-00001-of-00002.safetensors",
    )  # fmt: skip
    stale = ("adapter_config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json")
    with HubWriter() as hub:
        point_at(hub, monkeypatch)
        hub.repos["me/learned"] = dict.fromkeys((*mine, *stale), b"{}")
        assert export(run, tmp_path / "out") == 0
        found = set(hub.repos["me/learned"])
    assert found >= {*mine, "model.safetensors"} and not found & {*stale}


def test_a_token_that_may_not_write_is_told_and_the_folder_stays(
    run: PuppetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with HubWriter(token="another") as hub:
        point_at(hub, monkeypatch, token="hf_reads")
        assert export(run, tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert "the Hub did not take me/learned" in told and "type the command again" in told
    assert (tmp_path / "out" / "README.md").exists() and hub.repos == {}


@pytest.mark.slow
def test_a_hub_that_cannot_be_reached_is_told(
    run: PuppetRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with HubWriter() as hub:
        point_at(hub, monkeypatch)
    assert export(run, tmp_path / "out") == 2, "the server has ended"
    assert "the Hub did not take me/learned: [Errno 111] Connection refused" in capsys.readouterr().err


def point_at(hub: HubWriter, monkeypatch: pytest.MonkeyPatch, token: str = "hf_writes") -> None:
    from huggingface_hub import constants

    client: Any = constants
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(client, "ENDPOINT", hub.url)
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET"):
        monkeypatch.setattr(client, name, name.endswith("XET"), raising=False)
