"""No secret goes where others read: into control records by `--option env=`, into a bucket of code by a hidden file."""

import io
import zipfile
from hashlib import sha256
from pathlib import Path

import pytest

from executors.platforms.packages.wheel import pack_code
from executors.platforms.places import Place
from executors.preflight.place_faults import plain_secret


@pytest.mark.parametrize(
    "env",
    [{"HF_TOKEN": "x"}, {"AWS_SECRET_ACCESS_KEY": "x"}, {"db_password": "x"}, {"OPENAI_API_KEY": "x"},
     {"DILOCO_RUN_KEY": "x"}, {"ANYTHING": "hf_abcdefghijklmnop"}, {"HTTPS_PROXY": "http://me:hf_abc@proxy:3128"}],
)  # fmt: skip
def test_a_secret_in_a_place_s_environment_is_refused(env: dict[str, str]) -> None:
    (name,) = env
    for place in (Place("modal", env=env), Place("hf-jobs", options={"env": env})):
        why = plain_secret(place)
        assert "the bucket keeps it in plain" in why and f"--secret {name}" in why and "hf_abc" not in why


@pytest.mark.parametrize(
    "pip", [["git+https://x:s3cret@github.com/me/reward"], ["git+https://ghp_0123456789abcdef@github.com/me/r"]]
)
def test_a_credential_in_an_option_is_refused_and_not_shown(pip: list[str]) -> None:
    """Before: the control records, the job and the quote had it in plain."""
    for name, value in (("pip", pip), ("code", pip[0])):
        why = plain_secret(Place("hf-jobs", options={name: value}))
        assert why.startswith(f"--{name} of hf-jobs has a token") and "s3cret" not in why and "ghp_" not in why
    assert plain_secret(Place("hf-jobs", options={"pip": ["git+ssh://git@github.com/me/reward", "trl==1.0"]})) == ""


@pytest.mark.parametrize(
    ("text", "is_one"),
    [("docker://ubuntu:22.04@sha256:0123", False), ("git+https://oauth2:${TOKEN}@gitlab.com/a/b", False),
     ("https://me:$HF_TOKEN@host/x", False), ("https://me:$ecret@host/x", True), ("https://me:x${A}@host/x", True),
     ("docker://me:s3cret@reg.io/ubuntu:22.04@sha256:0123", True)],
)  # fmt: skip
def test_a_digest_and_a_variable_s_name_are_no_password(text: str, is_one: bool) -> None:
    """Before: an image with its digest, and a token that the machine fills in, were refused."""
    assert bool(plain_secret(Place("sky", options={"setup": text}))) == is_one


@pytest.mark.parametrize(
    "env",
    [{}, {"TOKENIZERS_PARALLELISM": "1"}, {"MAX_TOKENS": "9"}, {"AWS_REGION": "eu"}, {"HTTP_PROXY": "http://proxy:3128"}],
)  # fmt: skip
def test_other_variables_are_none(env: dict[str, str]) -> None:
    assert (
        plain_secret(Place("modal", env=env)) == "" == plain_secret(Place("slurm", options={"env": env, "mem": "1GB"}))
    )


def test_what_is_hidden_does_not_go_along_with_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "my_rewards_xyz"
    hidden = (".env", ".git/config", ".git/HEAD", "sub/.env.local", "sub/id_ed25519", "tls/server.KEY", "a.pem")
    for name in ("__init__.py", "data/words.txt", "keys.py", *hidden):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("SECRET=1")
    monkeypatch.syspath_prepend(str(tmp_path))
    shipment = pack_code("/code", ("my_rewards_xyz",))
    names = zipfile.ZipFile(io.BytesIO(shipment.files[shipment.wheel])).namelist()
    ours = {name for name in names if name.startswith("my_rewards_xyz/")}
    assert ours == {"my_rewards_xyz/__init__.py", "my_rewards_xyz/data/words.txt", "my_rewards_xyz/keys.py"}
    assert (
        f"#sha256={sha256(shipment.files[shipment.wheel]).hexdigest()}\n" in shipment.files["requirements.txt"].decode()
    )
    said = {".env", ".git", "sub/.env.local", "sub/id_ed25519", "tls/server.KEY", "a.pem"}
    assert set(shipment.left_out) == {f"my_rewards_xyz/{name}" for name in said}
