"""Secrets of the environment are masked in what a run keeps, wherever a text of the user's code comes in."""

import json

import pytest

from diloco.process.journal import Journal, read_log
from executors.platforms.container import _make_end
from inner.masking import mask_secrets, secret_masker, secrets_here
from rendezvous import layout
from rendezvous.stores.memory import MemoryStore
from tests.support.fakes import ManualClock

KEY = "AIza-0123456789"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", KEY)


def test_an_events_texts_have_no_secret(capsys: pytest.CaptureFixture[str]) -> None:
    """Before: the text of a judge's HTTPError, with ?key=…, went into the log, the report and the published page."""
    store = MemoryStore()
    journal = Journal(store, ManualClock(), "r00", 1)
    journal.emit("reward_failed", step=0, text=f"HTTPError: 400 for url: https://api/score?key={KEY}")
    journal.emit("lost", slot="r00", tail=["Traceback", f"KeyError: '{KEY}'"])
    journal.flush()
    failed, lost = read_log(store, layout.log_key("r00", 1, 0)).events
    assert failed["text"].endswith("?key=***") and lost["tail"] == ["Traceback", "KeyError: '***'"]
    assert KEY not in str([store.get(key) for key in store.list("")]) + "".join(capsys.readouterr())


def test_a_password_in_a_url_of_the_environment_is_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: an error of a reward that named its proxy carried the proxy's password into the log."""
    monkeypatch.setenv("HTTPS_PROXY", "http://al:s3cretpw@proxy:3128")
    text = "ProxyError: http://al:s3cretpw@proxy:3128 refuses 's3cretpw'"
    assert mask_secrets(text) == "ProxyError: http://***@proxy:3128 refuses '***'"
    assert secrets_here({"RUN": "s3://bucket/a:b", "AT": "http://host:3128/@x", "SHORT": "redis://:pw@host"}) == []


def test_the_last_lines_of_a_container_have_no_secret() -> None:
    assert _make_end(1, tail=(f"key={KEY}",))["tail"] == ["key=***"]


def test_numbers_and_short_values_are_no_secrets() -> None:
    """Before: TOKEN_BUDGET=10000000 masked that number in JSON, and the line could not be read."""
    environ = {"TOKEN_BUDGET": "10000000", "TOKEN_RATE": "-0.12345678", "TOKENIZERS_X": "true", "A_KEY": "k" * 8}
    assert secrets_here(environ) == ["k" * 8]
    assert json.loads(secret_masker(secrets_here(environ))(json.dumps({"n": 10000000}))) == {"n": 10000000}


def test_names_of_files_and_tokenizers_are_no_secrets() -> None:
    """Before: TOKENIZER_NAME=Qwen/Qwen3-0.6B turned the model's name into *** in every event."""
    for name in ("TOKENIZER_NAME", "HF_TOKENIZER", "SSH_KEY_PATH", "TOKEN_FILE", "my_secret_dir", "TOKENIZERS_PATH"):
        assert secrets_here({name: "Qwen/Qwen3-0.6B"}) == [], name
    for name in ("TOKENIZER_API_KEY", "PATH_KEY", "HF_TOKEN", "KEY_FILE_PASSWORD", "TOKEN_FILES"):
        assert secrets_here({name: "Qwen/Qwen3-0.6B"}), name
    assert secrets_here({"TOKEN_RATE": "1.25000001e-05"}) == [], "a number in JSON"


@pytest.mark.parametrize(
    "text", ["line\n0secret-abcdef", "\u00f00secret-abcdef", "\\n0secret-abcdef", "n0secret-abcdef"]
)
def test_no_escape_sequence_is_cut(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before: of a line's end before a secret without its first letter, a lone backslash was left."""
    for secret in ("n0secret-abcdef", "f00secret-abcdef"):
        monkeypatch.setenv("HF_TOKEN", secret)
        line = secret_masker(secrets_here())(json.dumps({"text": text}))
        assert json.loads(line) == {"text": text.replace(secret, "***")}
        assert mask_secrets(text) == text.replace(secret, "***")


@pytest.mark.parametrize("value", ['with "quotes" in it', "a\\backslash\\x", "ümläut-1234"])
def test_a_secret_is_found_in_any_spelling(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", value)
    assert mask_secrets(f"before {value} after") == "before *** after"
