"""What is said when a server cannot be reached: a proxy, a certificate, and never a part of a proxy's password."""

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from inner.errors import InnerError
from inner.network import AUTHORITIES, PROXIES, network_words
from inner.replay.ask import _open_clients
from tests.support.loopback import serve
from tests.support.proxies import WantsLogin

LOGIN = "joe:s3cr3t#pw"


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*PROXIES, *AUTHORITIES):
        monkeypatch.delenv(name, raising=False)


def test_words_without_anything_in_between() -> None:
    assert network_words(ConnectionRefusedError(111, "Connection refused")) == "Connection refused"
    assert network_words(httpx.ReadTimeout("")) == "ReadTimeout"


def test_a_proxy_that_may_be_the_cause_is_named_without_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://{LOGIN}@127.0.0.1:9")
    assert network_words(httpx.ConnectError("[Errno 111] Connection refused")).endswith("refused (HTTPS_PROXY is set)")
    with pytest.raises(httpx.InvalidURL) as wrong:  # its text is: Invalid port: 's3cr3t'
        httpx.Client()
    for error in (wrong.value, ValueError(f"http://{LOGIN}@127.0.0.1:9 isn't a valid proxy")):
        said = network_words(error)
        assert "s3cr3t" not in said and "the proxy of HTTPS_PROXY cannot be used. Write http://NAME:PASSWORD@" in said


def test_a_proxy_that_wants_a_login(monkeypatch: pytest.MonkeyPatch) -> None:
    with serve(WantsLogin) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", proxy)
        with pytest.raises(httpx.ProxyError) as refused:
            httpx.get("https://hub.example.com/")
    assert "407 Proxy Authentication Required. The proxy wants a name and a password: set HTTPS_PROXY=" in (
        network_words(refused.value)
    )


def test_a_certificate_and_a_lost_file_of_certificates(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    assert network_words(error).endswith("Name a file with your organisation's authority in SSL_CERT_FILE")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "lost.pem"))
    assert network_words(FileNotFoundError(2, "No such file or directory")).endswith(
        "SSL_CERT_FILE names no file: correct it"
    )


async def _open() -> None:
    async with _open_clients(1, 1.0, None):
        pass


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("HTTPS_PROXY", f"http://{LOGIN}@127.0.0.1:9", "the proxy of HTTPS_PROXY cannot be used"),
        ("HTTPS_PROXY", f"socks5://{LOGIN}@127.0.0.1:9", "HTTPS_PROXY"),
        ("SSL_CERT_FILE", "/absent/authority.pem", "SSL_CERT_FILE names no file"),
    ],
)
def test_teachers_need_a_client_that_can_be_made(monkeypatch, name: str, value: str, words: str) -> None:
    """Seen: httpx's traceback, with a part of the password."""
    monkeypatch.setenv(name, value)
    with pytest.raises(InnerError, match=words) as told:
        asyncio.run(_open())
    assert "s3cr3t" not in str(told.value)
