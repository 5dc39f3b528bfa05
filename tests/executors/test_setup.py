"""`diloco setup`: the real clients of Modal and the Hub against servers on loopback, through the command line."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from executors.cli import main as cli
from tests.support.hf_server import HFPlatform
from tests.support.modal_server import ModalPlatform
from tests.support.s3_server import S3Server


@pytest.fixture(autouse=True)
def nobodys_shell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith(("AWS_", "MODAL_", "HF_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "modal.toml"))


@pytest.fixture
def modal() -> Iterator[ModalPlatform]:
    with ModalPlatform() as platform:
        yield platform


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with S3Server(access_key="AKIDTEST") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield server


def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-value")


def said(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    code = cli.main(["setup", *argv])
    return code, capsys.readouterr().out


def test_modal_alone_is_enough_for_a_first_run(modal: ModalPlatform, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(capsys, "modal")
    assert code == 0 and "login    ok" in out and "store    ok" in out and "secret" not in out
    assert out.splitlines()[-1].startswith(
        "diloco train examples/modal_grpo.toml --run modal://diloco/first --executor modal"
    )
    (_, entries), *_ = modal.server.dicts.values()
    assert [key for key in entries if b"probe" in key] == []  # it leaves nothing behind


def test_a_user_who_is_not_logged_in_hears_so_first(modal: ModalPlatform, capsys: pytest.CaptureFixture[str]) -> None:
    modal.server.token = "another"
    code, out = said(capsys, "modal")
    assert code == 2 and "modal token new" in out and "store" not in out


def test_a_secret_is_made_of_this_shells_keys_and_not_shown(
    modal: ModalPlatform, s3: S3Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys(monkeypatch)
    code, out = said(capsys, "modal", "--run", "s3://bucket/first")
    assert code == 2 and "modal secret create diloco-storage" in out  # there was no terminal to say yes at
    code, out = said(capsys, "modal", "--run", "s3://bucket/first", "--yes")
    assert code == 0 and "--secret diloco-storage" in out and "secret-value" not in out
    made = dict(modal.server.secrets.values())["diloco-storage"]
    assert made["AWS_SECRET_ACCESS_KEY"] == "secret-value" and made["AWS_ENDPOINT_URL"] == s3.endpoint
    code, out = said(capsys, "modal", "--run", "s3://bucket/first")  # the second time it is there
    assert code == 0


def test_a_store_that_cannot_be_reached_ends_it_before_the_secret(
    modal: ModalPlatform, s3: S3Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = said(capsys, "modal", "--run", "s3://bucket/first", "--yes")
    assert code == 2 and "store    NO" in out and "next:" in out and not modal.server.secrets


def test_json_is_for_programs(modal: ModalPlatform, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(capsys, "modal", "--json")
    told: dict[str, Any] = json.loads(out)
    assert code == 0 and told["good"] and [step["name"] for step in told["steps"]] == ["login", "store"]


def test_hugging_face_makes_the_bucket_and_asks_for_the_keys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with HFPlatform() as platform:
        code, out = said(capsys, "hf")
        assert code == 2 and "bucket   NO" in out and not platform.hub.buckets
        code, out = said(capsys, "hf", "--yes")
        (bucket,) = platform.hub.buckets
        assert code == 2 and "keys     NO" in out and "Generate S3 credentials" in out and bucket.endswith("/diloco")
        keys(monkeypatch)
        namespace = bucket.split("/")[0]
        with S3Server(access_key="AKIDTEST", buckets=("diloco",), base=f"/{namespace}") as gateway:
            monkeypatch.setenv("HF_S3_ENDPOINT", gateway.endpoint.removesuffix(f"/{namespace}"))
            code, out = said(capsys, "hf")
        assert code == 0 and "store    ok" in out
        assert f"--run hf://buckets/{bucket}/first --executor hf-jobs --gpu t4-small --secret HF_TOKEN" in out


def test_a_folder_of_this_machine_is_refused_before_the_first_step(capsys: pytest.CaptureFixture[str]) -> None:
    """Before: "all there", and a command that `train` refuses."""
    for place in ("modal", "hf"):
        assert cli.main(["setup", place, "--run", "runs/mine"]) == 2
        assert "is a folder of this machine" in capsys.readouterr().err


def test_hugging_face_without_a_login(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with HFPlatform() as platform:
        monkeypatch.delenv("HF_TOKEN")
        code, out = said(capsys, "hf", "--run", "hf://buckets/x/diloco/first")
        assert code == 2 and "hf auth login" in out and not platform.hub.buckets
