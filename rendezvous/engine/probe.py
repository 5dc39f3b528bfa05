"""Tests and measurements of a store, which show whether it can carry a run.

    exclusive create    16 writers, one key, several rounds: at most one create succeeds, and its body stays
    create twice        the second create fails, and the first body stays
    read after write    a read right after a write returns the written bytes
    ranges              ranged reads return the right bytes, and fail past the end
    list                seconds until a new key is listed (a hint: it may be slow)
    delete              deleted objects are gone, and a missing key is not an error
    latency, speed      small GETs and creates; one blob up and down

If the store answers a measurement with an error, its row of the table shows the error; the others still run.

    measure_throughput(store, clock, size)             the speed alone; stores/race.py has the first two alone
    probe_store(store, clock) ─▶ Probe ─▶ .why_unfit()  None, or why not
                                 ─▶ sync_estimate(probe, parameters, replicas, codec)
                                 ─▶ doctor_table(probe, …)

The keys are below probe/{nonce}/ and are deleted afterwards.  No other write-once key is ever deleted; the probe's keys
can be, as no other process knows them.
Not promised: that a store which passes works under every fault; today's prices.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from statistics import median
from textwrap import wrap
from typing import TypeVar
from urllib.parse import urlsplit

from rendezvous.agreement.rules import Rules, Timing, reduces_sharded
from rendezvous.clock import Clock
from rendezvous.codecs.choose import nominal_ratio, sync_seconds
from rendezvous.errors import StoreError
from rendezvous.store import Store
from rendezvous.stores.race import (
    OVERWRITES,
    RACERS,
    ROUNDS,
    Race,
    delete_quietly,
    ignore_conflict,
    keeps_first,
    race_writers,
    retry_unclear,
)
from rendezvous.stores.uplink import LEAST, REQUEST_S

T = TypeVar("T")

LIST_PATIENCE_S = 10.0
_RANGE, _PART, _SINGLE = 16 << 20, 32 << 20, 64 << 20  # as in stores/cloud/store.py


@dataclass(frozen=True)
class Probe:
    """The measurements at `url`.

    troubles: measurement -> the store's error; the measurement's field then has the value of a failed test.
    """

    url: str
    race: Race
    keeps_first: bool
    reads_its_writes: bool
    ranges: bool
    notices_end: bool
    list_lag_s: float | None  # None: not listed within LIST_PATIENCE_S
    get_s: float
    create_s: float
    size: int  # bytes of the blob that was timed
    put_bytes_s: float
    get_bytes_s: float
    deletes: bool = True
    troubles: Mapping[str, str] = field(default_factory=dict[str, str])

    def why_unfit(self) -> str | None:
        """Return the reason why this store cannot carry a run; None if it can."""
        if reason := self.race.why_unfit():
            return reason
        if name := next((name for name in ESSENTIAL if name in self.troubles), None):
            return f"the test of {ESSENTIAL[name]} failed: {self.troubles[name]}"
        if not self.keeps_first:
            return OVERWRITES
        if not self.reads_its_writes:
            return "a read after a write returns other bytes: a run needs read-after-write consistency"
        if 0 < self.put_bytes_s < LEAST / REQUEST_S:
            return f"an upload of {LEAST >> 20} MiB takes more than {REQUEST_S:.0f} s, the limit, on this link"
        if not self.ranges:
            return "ranged reads return wrong bytes"
        if not self.notices_end:
            return "a read past the end of an object does not fail"
        return None


# The measurements that a store must pass: measurement -> its row in the table.
ESSENTIAL = {
    "keeps_first": "a second create",
    "reads_its_writes": "reading what was written",
    "ranges": "reading parts of objects",
    "rates": "a large blob",
}


@dataclass(frozen=True)
class Estimate:
    """Costs of one outer sync, for all replicas together.

    dollars: the costs by the list prices of 2026 in us-east-1; None if they are unknown.
    """

    seconds: float
    puts: int
    gets: int
    upload_bytes: int
    download_bytes: int
    dollars: float | None
    egress_dollars: float | None  # the cost of downloads if the replicas run outside the store's cloud
    mode: str = "direct"

    @property
    def requests(self) -> int:
        return self.puts + self.gets


def probe_store(store: Store, clock: Clock, size: int = 32 << 20, rounds: int = ROUNDS, racers: int = RACERS) -> Probe:
    """Measure the store.   Raise the store's error if it refuses a read, or answers no read or no writer."""
    at = f"probe/{os.urandom(6).hex()}/"
    retry_unclear(clock, lambda: store.get(f"{at}own"), times=2)  # one slow client alone, before 16 at once
    try:
        return _measure_all(store, clock, at, size, rounds, racers)
    finally:
        _delete_probe_keys(store, at, rounds)


def measure_throughput(store: Store, clock: Clock, size: int) -> tuple[float, float]:
    """Return bytes per second (up, down), measured with one blob of `size` bytes."""
    key = f"probe/{os.urandom(6).hex()}/blob"
    try:
        return _measure_rates(store, clock, key, size)
    finally:
        delete_quietly(store, [key])


def _measure_all(store: Store, clock: Clock, at: str, size: int, rounds: int, racers: int) -> Probe:
    raced = race_writers(store, clock, f"{at}race/", rounds, racers)
    troubles: dict[str, str] = {}

    def measure_or_note(name: str, measurement: Callable[[], T], unknown: T) -> T:
        try:
            return measurement()
        except StoreError as error:
            troubles[name] = str(error)
            return unknown

    ranges, notices_end = measure_or_note("ranges", lambda: _check_ranges(store, f"{at}range", clock), (False, False))
    small = measure_or_note("latencies", lambda: _measure_latencies(store, clock, f"{at}small/"), ([0.0], [0.0]))
    up, down = measure_or_note("rates", lambda: _measure_rates(store, clock, f"{at}blob", size), (0.0, 0.0))
    return Probe(
        url=store.url,
        race=raced,
        keeps_first=measure_or_note("keeps_first", lambda: keeps_first(store, f"{at}twice", clock), False),
        reads_its_writes=measure_or_note(
            "reads_its_writes", lambda: _reads_its_writes(store, f"{at}own", clock), False
        ),
        ranges=ranges,
        notices_end=notices_end,
        list_lag_s=measure_or_note("list", lambda: _list_lag(store, clock, f"{at}listed/"), None),
        get_s=median(small[0]),
        create_s=median(small[1]),
        size=size,
        put_bytes_s=up,
        get_bytes_s=down,
        deletes=measure_or_note("delete", lambda: _check_deletes(store, clock, f"{at}gone/"), False),
        troubles=troubles,
    )


# ---------------------------------------------------------------------- single measurements


def _reads_its_writes(store: Store, key: str, clock: Clock) -> bool:
    for n in range(5):
        body = b"%d" % n
        retry_unclear(clock, lambda body=body: store.put(key, body))
        if retry_unclear(clock, lambda: store.get(key)) != body:
            return False
    return True


def _check_ranges(store: Store, key: str, clock: Clock) -> tuple[bool, bool]:
    """Return (whether the bytes are right, whether reads past the end fail)."""
    body = os.urandom(10_000)
    out = bytearray(1000)
    retry_unclear(clock, lambda: store.put(key, body))
    right = retry_unclear(clock, lambda: store.get_into(key, memoryview(out), 1234)) and bytes(out) == body[1234:2234]
    beyond = [
        retry_unclear(clock, lambda start=start: store.get_into(key, memoryview(out), start))
        for start in (9001, 10_000, 50_000)
    ]
    return bool(right), not any(beyond)


def _list_lag(store: Store, clock: Clock, at: str) -> float | None:
    retry_unclear(clock, lambda: store.put(f"{at}key", b"x"))
    began = clock.now()
    while clock.now() - began < LIST_PATIENCE_S:
        asked = clock.now()
        if f"{at}key" in (retry_unclear(clock, lambda: store.list(at)) or []):
            return asked - began
        clock.sleep(0.2)
    return None


def _check_deletes(store: Store, clock: Clock, at: str) -> bool:
    """Delete two keys and a missing one in one call, as the collector does.   Return whether they are gone."""
    for name in ("a", "b"):
        retry_unclear(clock, lambda name=name: store.put(f"{at}{name}", b"x"))
    retry_unclear(clock, lambda: store.delete([f"{at}{name}" for name in ("never", "a", "b")]))
    return all(retry_unclear(clock, lambda name=name: store.get(f"{at}{name}")) is None for name in ("a", "b"))


def _measure_latencies(store: Store, clock: Clock, at: str, times: int = 9) -> tuple[list[float], list[float]]:
    """Return the seconds of small (gets, creates)."""
    gets = list[float]()
    creates = list[float]()
    for n in range(times):
        creates.append(_seconds_of(clock, lambda n=n: ignore_conflict(lambda: store.create(f"{at}{n}", b"x" * 200))))
        gets.append(_seconds_of(clock, lambda n=n: ignore_conflict(lambda: store.get(f"{at}{n}"))))
    return gets, creates


def _measure_rates(store: Store, clock: Clock, key: str, size: int) -> tuple[float, float]:
    """Return bytes per second of (a put, a get) of one blob; the get writes to memory that was used before."""
    body = bytearray(os.urandom(1 << 10) * (size // 1024 + 1))[:size]
    put_s = _seconds_of(clock, lambda: retry_unclear(clock, lambda: store.put(key, memoryview(body))))
    get_s = _seconds_of(clock, lambda: retry_unclear(clock, lambda: store.get_into(key, memoryview(body))))
    return size / max(put_s, 1e-9), size / max(get_s, 1e-9)


def _seconds_of(clock: Clock, action: Callable[[], object]) -> float:
    began = clock.now()
    action()
    return clock.now() - began


def _delete_probe_keys(store: Store, at: str, rounds: int) -> None:
    names = ["twice", "own", "range", "blob", "listed/key", "gone/a", "gone/b"]
    names += [f"race/{n}" for n in range(rounds)] + [f"small/{n}" for n in range(9)]
    delete_quietly(store, [f"{at}{name}" for name in names])  # by name, because LIST may be out of date


# ---------------------------------------------------------------------- the cost of a sync

#        put or list, get: dollars per request     egress: dollars per GB that leaves the cloud
_S3 = (5e-6, 4e-7, 0.09)
_R2 = (4.5e-6, 3.6e-7, 0.0)
POLLS = 10  # GETs of one replica while it waits for the others


def sync_estimate(probe: Probe, parameters: int, replicas: int, codec: str = "fp32") -> Estimate:
    """Estimate one outer sync, direct or sharded as the replicas would choose; its phases do not overlap."""
    blob = ceil(4 * parameters / nominal_ratio(codec))
    n = replicas
    sharded = reduces_sharded([blob] * n, codec, Rules().shard_from)
    part = ceil(blob / n)
    up, down = (blob + part, 2 * (n - 1) * part) if sharded else (blob, (n - 1) * blob)
    puts = n * (_requests_to_put(blob) + 2 + sharded * (_requests_to_put(part) + 1)) + 1  # offer, beat; one commit
    gets = n * ((2 if sharded else 1) * (n - 1) * ceil((part if sharded else blob) / _RANGE) + n + POLLS)
    seconds = sync_seconds(codec, parameters, n, probe.put_bytes_s, probe.get_bytes_s)
    seconds += (2 + sharded) * probe.create_s + (n + 2) * probe.get_s
    price = _price_of(probe.url)
    dollars = None if price is None else puts * price[0] + gets * price[1]
    egress = None if price is None else n * down / 1e9 * price[2]
    return Estimate(
        seconds, puts, gets, upload_bytes=n * up, download_bytes=n * down, dollars=dollars, egress_dollars=egress,
        mode="sharded" if sharded else "direct",
    )  # fmt: skip


def _requests_to_put(blob: int) -> int:
    return 1 if blob <= _SINGLE else 2 + ceil(blob / _PART)


def _price_of(url: str) -> tuple[float, float, float] | None:
    parts = urlsplit(url)
    endpoint = parts.query or next((os.environ[n] for n in _ENDPOINTS if os.environ.get(n)), "")
    if parts.scheme != "s3":
        return None
    if "r2.cloudflarestorage.com" in endpoint:
        return _R2
    return _S3 if "endpoint" not in parts.query and "://" not in endpoint else None


_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")


# ---------------------------------------------------------------------- for people


def doctor_table(
    probe: Probe, parameters: int | None = None, replicas: int = 4, codec: str = "fp32", why: str = ""
) -> str:
    """Return a text table of a probe.   why: name of the codec that `auto` would choose, and the reason."""
    raced = probe.race
    lag = probe.list_lag_s
    lagged = f"not within {LIST_PATIENCE_S:.0f} s (a list is only a hint)" if lag is None else f"after {lag:.1f} s"
    deletes = "and accepts missing ones" if probe.deletes else 'set fleet.keep = "all": nothing can be collected here'
    rates = f"{probe.put_bytes_s / 1e6:.0f} MB/s, {probe.get_bytes_s / 1e6:.0f} MB/s"
    winners = f"{max(raced.winners)} winner" + ("" if max(raced.winners) == 1 else "s")
    raced_by = f"{raced.racers} at once, {len(raced.winners)} rounds: {winners}"

    def row_of(name: str, measurement: str, verdict: bool | str, remark: str) -> tuple[str, str, str]:
        word = verdict if isinstance(verdict, str) else "ok" if verdict else "NO"
        trouble = probe.troubles.get(measurement)
        return (name, word, remark) if trouble is None else (name, "NO", trouble)

    rows = [
        row_of("only one writer wins", "race", not raced.why_unfit(), raced_by),
        row_of("the first body stays", "keeps_first", probe.keeps_first, "created twice"),
        row_of("reads what was written", "reads_its_writes", probe.reads_its_writes, "at once"),
        row_of("reads parts of objects", "ranges", probe.ranges and probe.notices_end, "and notices their end"),
        row_of("lists new objects", "list", "ok" if lag is not None else "slow", lagged),
        row_of("deletes objects", "delete", probe.deletes, deletes),
        row_of("small read, create", "latencies", "", f"{1e3 * probe.get_s:.1f} ms, {1e3 * probe.create_s:.1f} ms"),
        row_of("up, down", "rates", "", f"{rates} (one blob of {probe.size / 1e6:.0f} MB)"),
    ]
    if parameters is not None and probe.put_bytes_s:
        rows += _sync_rows(sync_estimate(probe, parameters, replicas, codec), parameters, replicas, codec)
        rows += [("" if i else "codec = auto would be", "", line) for i, line in enumerate(wrap(why, 84))]
    reason = probe.why_unfit()
    last = "This store can carry a run." if reason is None else f"This store cannot carry a run: {reason}."
    return "\n".join([probe.url, *(f"  {a:<24}{b:<6}{c}" for a, b, c in rows), last])


def _sync_rows(estimate: Estimate, parameters: int, replicas: int, codec: str) -> list[tuple[str, str, str]]:
    what = f"{parameters / 1e6:,.0f} M parameters, {replicas} replicas, {codec}, {estimate.mode}"
    moved = f"{estimate.upload_bytes / 1e9:.2f} GB up, {estimate.download_bytes / 1e9:.2f} GB down"
    rows = [
        ("one outer sync (estimate)", "", what),
        ("  takes about", "", f"{estimate.seconds:.1f} s and {estimate.requests:,} requests"),
        ("  moves, all together", "", moved),
    ]
    if estimate.seconds > Timing.give_up:
        slow = f"replicas give up after {Timing.give_up:.0f} s: use a smaller codec or a faster link"
        rows.append(("  is too slow", "NO", slow))
    if estimate.dollars is not None:
        outside = f"; ${estimate.egress_dollars:.2f} more from outside that cloud" if estimate.egress_dollars else ""
        rows.append(("  costs about", "", f"${estimate.dollars:.5f} for requests{outside}"))
    return rows
