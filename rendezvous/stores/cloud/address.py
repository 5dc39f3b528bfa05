"""The URL of a bucket, and the settings of the environment that belong to it.

    s3://bucket/prefix?endpoint=…&region=…    gs://    az://    hf://buckets/namespace/bucket/prefix, by its S3 gateway

A URL stands in logs and records, so it carries no credentials.

Not promised: that the server of an endpoint is a store (`diloco doctor`).
"""

import ipaddress
import os
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit

from rendezvous.stores.cloud.credentials import aws_file, keys_of, profile_in
from rendezvous.stores.urls import bucket_url

HF_GATEWAY = "https://s3.hf.co"
OPTIONS = ("endpoint", "region")  # options that a URL's query may have; none is secret
_ENDPOINT_ENV = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
}
_ENDPOINT = re.compile(r"https?://([^/@]*@)?(\[[\da-fA-F:.]+\]|[^][/:@\s]+)(:\d{1,5})?(/\S*)?")


@dataclass(frozen=True)
class Address:
    """Address of a bucket.   url: a URL without secrets, for messages."""

    scheme: str
    bucket: str
    prefix: str
    url: str
    endpoint: str = ""
    region: str = ""


def parse_address(url: str) -> Address:
    """Parse the URL of a bucket.   Raise ValueError for a wrong URL; the error's text has no possible secrets."""
    bucket_url(url)
    try:
        parts = urlsplit(url)
        plain = parts.netloc.rpartition("@")[2]
        secret = "@" in parts.netloc
        query = dict(parse_qsl(parts.query))
    except ValueError:
        raise ValueError("this URL cannot be read; write s3://bucket/prefix") from None
    where = f"{parts.scheme}://{plain}{parts.path.rstrip('/')}"
    if secret or set(query) - set(OPTIONS) or "@" in query.get("endpoint", ""):
        raise ValueError(
            f"{where}: the URL of a run is written into logs and records, so it may not carry credentials or options "
            f"other than {' and '.join(OPTIONS)}. {keys_of(parts.scheme)}"
        )
    bucket = plain
    prefix = parts.path.strip("/")
    endpoint = query.get("endpoint", "")
    if parts.scheme == "hf":
        bucket, prefix, endpoint = _parse_hf(where, f"{plain}{parts.path}", endpoint)
    if not bucket:
        raise ValueError(f"{where}: the bucket is missing; write {parts.scheme}://bucket/prefix")
    kept = f"?{urlencode(query, safe=':/')}" if query else ""
    return Address(parts.scheme, bucket, prefix, f"{where}{kept}", endpoint, query.get("region", ""))


def _parse_hf(where: str, path: str, endpoint: str) -> tuple[str, str, str]:
    kind, namespace, bucket, prefix = [*path.strip("/").split("/", 3), "", "", ""][:4]
    if kind != "buckets" or not bucket:
        raise ValueError(f"{where}: on the Hub, a run must be in a bucket; write hf://buckets/namespace/bucket/prefix")
    gateway = endpoint or os.environ.get("HF_S3_ENDPOINT") or HF_GATEWAY
    return bucket, prefix, f"{gateway.rstrip('/')}/{namespace}"


def endpoint_of(address: Address) -> str:
    """Return the server that the URL's `endpoint` or the environment names; "" for the cloud's own server."""
    named = _ENDPOINT_ENV.get(address.scheme, ())
    return address.endpoint or next((os.environ[n] for n in named if os.environ.get(n)), "")


def plain_http(endpoint: str) -> bool:
    """Whether the endpoint uses http.   Raise ValueError if the run would be sent unencrypted without permission."""
    parts = urlsplit(endpoint)
    if parts.scheme != "http":
        return False
    if is_loopback(parts.hostname or "") or os.environ.get("AWS_ALLOW_HTTP", "").lower() in ("1", "true"):
        return True
    raise ValueError(
        f"http://{parts.hostname} would carry the run unencrypted; use https, or set AWS_ALLOW_HTTP=true if you mean it"
    )


def check_settings(address: Address, endpoint: str) -> None:
    """Raise ValueError for a setting with which obstore panics, signs wrongly, or asks another server than aws does."""
    read = {"s3": ("AWS_", "HF_S3"), "az": ("AZURE_STORAGE_",)}.get(address.scheme, ())
    for name, value in os.environ.items():
        if name.startswith(read) and not (value.isprintable() and value == value.strip()):
            raise ValueError(
                f"the variable {name} begins or ends with a blank, or has a line break: set it again without them"
            )
    if endpoint and not _ENDPOINT.fullmatch(endpoint):
        shown = endpoint.rpartition("@")[2]
        raise ValueError(f"the endpoint {shown!r} is not a URL: write http://HOST:PORT, or https://HOST:PORT")
    if address.scheme == "s3" and not endpoint and (named := profile_in(aws_file("CONFIG")).get("endpoint_url")):
        raise ValueError(
            f"~/.aws/config names the endpoint {named.rpartition('@')[2]!r}. Other machines' replicas do not have "
            f"that file, so it is not used: set AWS_ENDPOINT_URL, or write {address.url.partition('?')[0]}?endpoint=…"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
