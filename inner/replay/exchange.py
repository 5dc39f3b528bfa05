"""Send one request to a teacher, and return its outcome, which is always a Reading.

    POST ──▶ status, headers, a body of at most B bytes, all before the deadline ──▶ read_response ──▶ Reading
      │        │                 │                        │
      │        │                 │                        └ too slow, or silence         again    at the worst case
      │        │                 └ longer, or a gzip bomb                                failed   at the worst case
      │        └ cut off, truncated, not HTTP                                            again    at the worst case
      ├ no connection                                                                    again    free: never sent
      └ anything else                                                                    failed   at the worst case

    B = 1 MiB + 64 bytes · max_tokens

The deadline is for the whole exchange, because a server that sends one byte a second never triggers a timeout between
two reads. The request asks for an uncompressed answer (`Accept-Encoding: identity`); if an answer is compressed, we
unpack at most B bytes. The body is always read as UTF-8: the charset in the headers could name any Python codec, and
some codecs do not decode to text.

Not promised: that an endpoint charges nothing for an exchange that was cut off. So we count the worst case for it.
"""

import asyncio
import json
import logging
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import httpx

from inner.network import network_words
from inner.replay.teachers import Reading, Teacher, read_response
from inner.replay.untrusted import printable_start

log = logging.getLogger(__name__)

BODY_FLOOR = 2**20  # bytes for the parts of a response beside the answer: reasoning, log-probs, routing
BYTES_PER_TOKEN = 64  # enough for ordinary text; the longest tokens are runs of spaces
_HEADERS = {"content-type": "application/json", "accept": "application/json", "accept-encoding": "identity"}


class _TooLarge(Exception):
    """The body is longer than any answer to this request."""


async def send_and_read(
    client: httpx.AsyncClient,
    teacher: Teacher,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    *,
    timeout_s: float,
    now: float,
) -> Reading:
    """Post the request and read the response. Raises only CancelledError.   now: Unix seconds."""
    try:
        async with asyncio.timeout(timeout_s):
            reading = await _post_and_read(client, teacher, body, headers, now)
    except TimeoutError:
        reading = Reading("again", f"no whole answer from {teacher.url} within {timeout_s:g} s")
    except (httpx.ConnectError, httpx.ProxyError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        reading = Reading(
            "again", f"no connection to {teacher.url} ({network_words(error)})", cost_nano=0, unreachable=True
        )
    except _TooLarge as error:
        reading = Reading("failed", f"{teacher.url} sent {error}")
    except (httpx.TransportError, httpx.StreamError) as error:  # the endpoint may have processed the request
        reading = Reading("again", f"the connection to {teacher.url} broke ({error!r:.200})")
    except Exception as error:
        log.warning("unforeseen while asking %s; counted at the worst case", teacher.url, exc_info=True)
        reading = Reading("failed", f"unforeseen: {error!r:.200}")
    return _without_key(reading, headers)


def body_limit(teacher: Teacher) -> int:
    """Return how many bytes a response may have."""
    return BODY_FLOOR + BYTES_PER_TOKEN * teacher.max_tokens


def unpack_body(raw: bytes, encoding: str, most: int) -> bytes:
    """Undo the body's content-encoding.

    Raise ValueError for an unknown or broken encoding, and _TooLarge if the result has more than `most` bytes.
    """
    if encoding in ("", "identity"):
        return raw
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise ValueError(f"content-encoding {printable_start(encoding, 40)!r}, and the request asks for identity")
    try:
        body = zlib.decompressobj(wbits=47).decompress(raw, most + 1)  # 47: zlib's or gzip's header
    except zlib.error as error:
        raise ValueError(f"no {encoding} ({error})") from error
    if len(body) > most:
        raise _TooLarge(f"a packed answer of more than {most} bytes")
    return body


async def _post_and_read(
    client: httpx.AsyncClient, teacher: Teacher, body: Mapping[str, Any], headers: Mapping[str, str], now: float
) -> Reading:
    content = json.dumps(body, allow_nan=False).encode()
    most = body_limit(teacher)
    async with client.stream("POST", teacher.url, content=content, headers={**headers, **_HEADERS}) as response:
        raw = await _read_at_most(response, most)
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if response.status_code != 200:  # a refusal counts even if its body cannot be read
        return read_response(
            teacher, response.status_code, response.headers, _refusal_body(raw[:most], encoding, most), now
        )
    if len(raw) > most:
        raise _TooLarge(f"an answer of more than {most} bytes for at most {teacher.max_tokens} tokens")
    try:
        return read_response(teacher, 200, response.headers, unpack_body(raw, encoding, most), now)
    except ValueError as error:
        return Reading("again", str(error))


def _refusal_body(raw: bytes, encoding: str, most: int) -> bytes:
    try:
        return unpack_body(raw, encoding, most)
    except (ValueError, _TooLarge):
        return b""


async def _read_at_most(response: httpx.Response, most: int) -> bytes:
    """Return the body; if it is longer than `most` bytes, return only a little more than `most` bytes."""
    body = bytearray()
    async for part in response.aiter_raw(2**16):
        body += part
        if len(body) > most:
            break
    return bytes(body)


def _without_key(reading: Reading, headers: Mapping[str, str]) -> Reading:
    """Remove the API key from the reason: an endpoint may repeat the key, and we write the reason to ledger and log."""
    key = headers.get("Authorization", "").removeprefix("Bearer ")
    return replace(reading, why=reading.why.replace(key, "***")) if key and key in reading.why else reading
