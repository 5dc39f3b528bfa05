"""`diloco doctor`: what it says of good and bad stores, of a model's size, and what it leaves behind."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.run import sizing
from diloco.run.config import ConfigError, RunConfig
from executors.cli import main as cli
from executors.cli.checking import doctor
from inner import InnerConfig
from tests.support.s3_server import S3Server

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "BLOB", 1 << 20)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch):
    with S3Server(access_key="AKIDTEST") as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDTEST")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        yield server


def say(capsys, *argv: object) -> tuple[int, str, str]:
    code = cli.main(["doctor", *map(str, argv)])
    return code, *capsys.readouterr()


def test_a_folder_can_carry_a_run_and_is_left_as_it_was(capsys, tmp_path: Path) -> None:
    code, out, _ = say(capsys, tmp_path / "new" / "run")
    assert code == 0 and "This store can carry a run." in out and "one outer sync" not in out
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_keeps_it(capsys, tmp_path: Path) -> None:
    (tmp_path / ".tmp").mkdir()
    (tmp_path / "run.json").write_text("{}")
    assert say(capsys, tmp_path)[0] == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == [".tmp", "run.json"]


def test_memory(capsys) -> None:
    assert say(capsys, "memory://doctor", "--parameters", "50M")[0] == 0


def test_a_bucket_and_what_a_sync_takes(capsys, s3: S3Server) -> None:
    code, out, _ = say(capsys, "s3://bucket/run", "--parameters", "1.7B", "--replicas", "3")
    assert code == 0 and "1,700 M parameters, 3 replicas, fp32, sharded" in out
    assert "27.20 GB up, 27.20 GB down" in out and "codec = auto would be" in out
    assert s3.keys("bucket", "") == []


def test_a_store_that_overwrites(capsys, s3: S3Server) -> None:
    s3.overwrites = True
    code, out, err = say(capsys, "s3://bucket/run")
    assert code == 2 and "This store cannot carry a run: silently overwrites" in out and err == ""


@pytest.mark.parametrize(
    ("endpoint", "code", "words"),
    [
        ("http://127.0.0.1:9", 75, "no connection (http://127.0.0.1:9). The bucket is busy or cannot be"),
        ("127.0.0.1:9", 2, "the endpoint '127.0.0.1:9' is not a URL: write http://HOST:PORT, or https://HOST:PORT"),
        ("http:127.0.0.1:9", 2, "is not a URL"),
        ("http://me:secret@gateway:port", 2, "the endpoint 'gateway:port' is not a URL"),
    ],
)
def test_an_endpoint_that_is_wrong(
    capsys, s3: S3Server, monkeypatch: pytest.MonkeyPatch, endpoint: str, code: int, words: str
) -> None:
    """An address without http:// was a panic of the client; a port without a server was an unfit store."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    found, out, err = say(capsys, "s3://bucket/run")
    assert found == code and out == "" and words in err and len(err.splitlines()) == 1, err


def test_a_bucket_that_is_not_there(capsys, s3: S3Server) -> None:
    code, out, err = say(capsys, "s3://nowhere/run")
    assert code == 2 and out == "" and "There is no bucket 'nowhere'" in err and len(err.splitlines()) == 1


def test_the_model_codec_and_replicas_of_a_config(capsys, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three")
    inner = '[inner]\nloop = "supervised"\nmodel = "tiny"\ndata.text = "text.txt"\n'
    (tmp_path / "run.toml").write_text('[fleet]\nreplicas = 2\n[outer]\ncodec = "bf16"\n' + inner)
    code, out, _ = say(capsys, "memory://doctor", "--config", tmp_path / "run.toml")
    assert code == 0 and "0 M parameters, 2 replicas" in out and "moves, all together" in out


def test_of_a_config_with_an_adapter_the_adapter_counts(capsys, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("one two three")
    inner = f'[inner]\nloop = "supervised"\nmodel = "{tmp_path}"\ndata.text = "text.txt"\nlora.r = 16\n'
    (tmp_path / "run.toml").write_text(inner)
    body = json.dumps({"layers.0.q_proj.weight": {"shape": [200_000, 300_000]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body)
    code, out, _ = say(capsys, "memory://doctor", "--config", tmp_path / "run.toml")
    assert code == 0 and "estimate)      8 M parameters" in out


def test_sizes_of_the_built_in_models() -> None:
    from inner.worlds.tiny import tiny_model
    from inner.worlds.toolworld import ToolWorld

    sizes = {"tiny": tiny_model(128), "toolworld": ToolWorld().model(seed=0)}
    counted = {name: sum(p.numel() for p in model.parameters()) for name, model in sizes.items()}
    assert counted == sizing.BUILT_IN


def test_a_model_in_a_folder_is_counted_by_its_headers(tmp_path: Path) -> None:
    header = {"__metadata__": {}, "a": {"shape": [10, 7]}, "b": {"shape": [5]}, "c": {"shape": []}}
    body = json.dumps(header).encode()
    config = RunConfig(inner=InnerConfig(loop="supervised", model=str(tmp_path), data={"text": "text.txt"}))
    with pytest.raises(ConfigError, match="give --parameters N"):
        sizing.parameters_of(config)
    (tmp_path / "model.safetensors").write_bytes(len(body).to_bytes(8, "little") + body)
    assert sizing.parameters_of(config) == 76


def test_a_model_that_the_hub_does_not_tell_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub.HfApi, "get_safetensors_metadata", offline)
    config = RunConfig(inner=InnerConfig(loop="supervised", model="org/model", data={"text": "text.txt"}))
    with pytest.raises(ConfigError, match=r"parameters of org/model: no network. Give --parameters N"):
        sizing.parameters_of(config)


@pytest.mark.parametrize("text", ["", "x", "-5", "0", "1Q", "inf"])
def test_sizes_that_mean_nothing(capsys, text: str) -> None:
    with pytest.raises(SystemExit):
        say(capsys, "memory://doctor", f"--parameters={text}")
    assert "write e.g. 50000000, 50M or 1.7B" in capsys.readouterr().err


def test_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom executors.cli.main import main\nmain(sys.argv[1:])\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    command = [sys.executable, "-c", code, "doctor", str(tmp_path / "x"), "--parameters", "1M"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, env=env, capture_output=True, timeout=180).returncode == 0
