"""Names of secrets: all that an earlier release kept, in each spelling, and no more than the name says."""

import re
from itertools import product
from pathlib import Path

import pytest

from executors.preflight.secret_names import holds_secret, is_secret

OWNED = r"((my|our|hf|hub|huggingface|gh|github|gitlab|wandb|openai|anthropic|aws|api|access|auth|refresh)[._-]?)"
BEFORE = re.compile(  # of the release before the last word of a name counted
    r"(?!\.env\.(example|sample|template|dist)$)"
    r"(\.env.*|.*\.env|\.netrc|\.npmrc|\.pypirc|id_(rsa|dsa|ecdsa|ed25519).*|credentials.*|.*secret.*|service_account.*|"
    rf"\.?{OWNED}*token(\.(txt|json))?|.*\.(token|pem|key|p12|pfx))",
    re.I,
)
BEFORE_CODE = re.compile(rf"(?!tokens\.){OWNED}*(secrets?|credentials?|tokens?|api_?keys?|passwords?)\.py", re.I)
OWNERS = ("", "my", "hf", "HF", "github", "acme", "wandb", "openai", ".hf", "conf/prod", "conf.d/")
THINGS = (
    "token", "Token", "TOKEN", "tokens", "secret", "secrets", "secretfile", "secretsdata", "credentials", "password",
    "credentialsfile", "apikey", "API_KEYS", "apikeys", "key", "service_account", "service_accountkey", "id_rsa",
    "id_ed25519_work", "npmrc", "env", "env.local", "env.example.local",
)  # fmt: skip
ENDINGS = ("", ".txt", ".TXT", ".json", ".JSON", ".yaml", ".py", ".csv", ".env", ".pem", ".KEY")


def test_all_that_was_kept_before_is_kept() -> None:
    """Before: hftoken.txt, HF_TOKEN.TXT, APIkeys.py, secretfile.txt and others were sent, which a release had kept."""
    names = {f"{a}{b}{c}{d}" for a, b, c, d in product(OWNERS, ("", "_", "-", "."), THINGS, ENDINGS)}
    files = {name: name.rpartition("/")[2] for name in names}
    kept = {name for name, file in files.items() if (BEFORE_CODE if file[-3:] == ".py" else BEFORE).fullmatch(file)}
    assert len(kept) > 2000 and not sorted(name for name in kept if not is_secret(name))


KEPT = (
    "API_KEY.TXT", "APIkey.txt", "openaikey.txt", "openai_key.txt", "team_AWS_key.json", "wandb-key.txt", "my_key.txt",
    "openai_key.py", "acmetoken.txt", "acmeToken.JSON", "prodsecretfile.txt", "serviceaccountkey.json",
    "DBPASSWORD.INI", "id_rsa_example", "tóken.txt", "sécret.txt", "clé_API_KEY.txt", "我的token.txt",
    "accessKeys.csv", "bob_accessKeys.csv", "bob_accessKeys (1).csv", "access_keys.csv", "rootkey.csv",
    "rootkey (1).csv", "rootkey(1).csv", "bob accessKeys copy.csv", "bobAccessKeys.csv", "bob.accessKeys(1).csv",
    "bob_accessKeys – Kopie.csv", "bob_accessKeys_2024.csv", "hf_token copy.txt",
    "new_user_credentials.csv", "secrets_本番.py", "秘密/hf_tóken.py",
)  # fmt: skip
SENT = (
    "prod_secrets.template.json", "my_secrets.sample.json", "secretary.csv", "insulin_secretion.json", "nextToken.txt",
    "nexttoken.txt", "subtoken.json", "getSecrets.py", "loadcredentials.py", "read_tokens.py", "hf_keys.py",
    "answer_key.json", "keys.json", "monkeys.txt", "flaws_key.txt", "分词_token.py", "tokens_per_second.json",
    "keys.csv", "access.csv", "access_keystrokes.csv", "answer_keys.csv",
    "keyboard_access_key.csv", "access_key_ids.csv", "root_key.csv", "accessibility_keys.csv",
)  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_a_secret_is_one_in_each_spelling(name: str) -> None:
    assert is_secret(name)


@pytest.mark.parametrize("name", SENT)
def test_a_name_that_only_sounds_like_a_secret_s_is_none(name: str) -> None:
    assert not is_secret(name)


@pytest.mark.parametrize(
    ("text", "held"),
    [
        ("-----BEGIN DSA PRIVATE KEY-----", True), ("X = 'hf_" + "aB" * 17 + "'", True), ("sk-ant-" + "x" * 40, True),
        ("AKIAIOSFODNN7ABCDEFG", True), ("AKIAIOSFODNN7EXAMPLE", False), ("hf_token = os.environ['HF_TOKEN']", False),
        ("-----BEGIN PUBLIC KEY-----", False), ("-----BEGIN PRIVATE KEY-----" + " " * (1 << 16), False),
    ],
    ids=str.split("ssh hub anthropic aws aws-example environ public large"),
)  # fmt: skip
def test_a_key_is_known_by_its_form(tmp_path: Path, text: str, held: bool) -> None:
    (tmp_path / "file").write_text(text)
    assert holds_secret(tmp_path / "file") == held
    assert not holds_secret(tmp_path / "absent")
