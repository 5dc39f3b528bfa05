"""A second reader of runs, written from docs/formats.md.   json, hashlib, hmac, struct, xxhash, numpy; nothing of ours.

    snapshots/0 ─▶ θ₀, m₀      for t = 0, 1, …:   base = digest(θ, m)   chain, offers, weights, digests as announced
                               mean of the listed bodies ─▶ one Nesterov step ─▶ θ_{t+1}

`replay` raises AssertionError at the first byte that is not as the page says.

Not promised: speed; outer lr "auto" (tests/support/audit.py has that); topk's choice between equal magnitudes.
"""

import hashlib
import hmac
import json
import struct
import zlib
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import xxhash

FLT_MAX = np.float32(3.4028234663852886e38)
TINY = np.float32(2.0**-126)
ROWS = {"fp32": (1, 4), "bf16": (1, 2), "int8": (1024, 1028), "int4": (512, 260), "topk": (8192, 388)}
LEVELS = {"int8": 127, "int4": 7}
GATE = 1 << 18
GAINS = np.array([1, *(a / 2 / (1 - 0.5**a) for a in range(1, 9))], np.float64).astype(np.float32)


class Unsound(ValueError):
    """Bytes that no encoder writes."""


# ---------------------------------------------------------------------- records and digests


def canonical(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def digest(body: bytes, kind: str = "xxh3-128") -> str:
    hashes = {"xxh3-128": xxhash.xxh3_128_hexdigest, "sha256": lambda b: hashlib.sha256(b).hexdigest()}
    return f"{kind}:{hashes[kind](body)}"


def is_named(body: bytes, announced: str, *, sealed: bool = False) -> bool:
    kind = announced.partition(":")[0]
    return kind in (("sha256",) if sealed else ("xxh3-128", "sha256")) and digest(body, kind) == announced


def tag(secret: bytes, run: str, key: str, record: bytes) -> str:
    return hmac.new(secret, run.encode() + b"\0" + key.encode() + b"\0" + record, hashlib.sha256).hexdigest()


def unsealed(body: bytes, secret: bytes, run: str, key: str) -> bytes:
    """The record without its tag, which is checked."""
    record, mark, seal = body.rpartition(b',"seal":"')
    assert mark and seal.endswith(b'"}'), f"{key} has no tag"
    record += b"}"
    assert seal[:-2].decode() == tag(secret, run, key, record), f"{key} has another tag"
    return record


def safetensors(body: bytes) -> dict[str, np.ndarray]:
    (length,) = struct.unpack_from("<Q", body)
    types = {"F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "U8": "|u1"}
    arrays = dict[str, np.ndarray]()
    for name, entry in json.loads(body[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + at for at in entry["data_offsets"])
            arrays[name] = np.frombuffer(body[begin:end], types[entry["dtype"]]).reshape(entry["shape"]).copy()
    return arrays


def bundle(body: bytes, run: str, place: tuple[str, int, int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The record of a bundle of recorded rollouts, and its rollouts.   Raises Unsound."""
    payload, mark, line = body.removesuffix(b"\n").rpartition(b"\n")
    if not mark or not body.endswith(b"\n"):
        raise Unsound("no record in the last line")
    record = json.loads(line)
    if record["kind"] != "rollouts" or record["run"] != run or (record["slot"], *record["place"]) != place:
        raise Unsound(f"of another place: {record}")
    if not is_named(payload, record["digest"]):
        raise Unsound("another payload than the record names")
    (length,) = struct.unpack_from("<Q", payload)
    said = json.loads(json.loads(payload[8 : 8 + length])["__metadata__"]["bundle"])
    arrays = safetensors(payload)
    cut = lambda name, sizes: [a.tolist() for a in np.split(arrays[name], np.cumsum(arrays[sizes])[:-1])]  # noqa: E731
    rollouts = {name: cut(name, "lengths") for name in ("ids", "mask", "logprobs") if name in arrays}
    rollouts |= {"prompt_ids": cut("prompt_ids", "prompt_lengths"), "rewards": arrays["rewards"].tolist()}
    rollouts |= {name: said[name] for name in ("completions", "names", "weights", "environments", "calls")}
    rollouts["prompts"] = [said["prompts"][i] for i in said["prompt_of"]]
    if (record["rollouts"], record["tokens"]) != (len(rollouts["ids"]), sum(map(len, rollouts["ids"]))):
        raise Unsound("not so many rollouts or tokens as the record says")
    return record, rollouts


def late_reward(key: str, body: bytes, found: tuple[dict[str, Any], dict[str, Any]]) -> tuple[int, str, float]:
    """The rollout, name and value of a late reward beside a bundle (what `bundle` returned).   Raises Unsound."""
    reward, (record, rollouts) = json.loads(body), found
    generation, number = record["place"]
    ends = f".{reward['rollout']:04d}.{reward['name']}.reward"
    if not key.startswith(f"rollouts/{record['slot']}/{generation:010d}/{number:04d}.") or not key.endswith(ends):
        raise Unsound("under another key")
    if canonical(reward) != body or (reward["kind"], reward["of"]) != ("reward", record["nonce"]):
        raise Unsound("no reward of this bundle")
    known = [(r, w) for r, w in zip(rollouts["rewards"][reward["rollout"]], rollouts["weights"], strict=True) if r == r]
    if reward["recorded"] != (sum(r * w for r, w in known) if known else None):
        raise Unsound("its bundle has another reward")
    return reward["rollout"], reward["name"], reward["value"]


def base_of(fragments: list[list[np.ndarray]]) -> str:
    """fragments: of each one its arrays in order (θ, momentum, …).  Bare hexadecimal digits, no kind."""
    xxh3 = xxhash.xxh3_128_hexdigest
    each = [xxh3("".join(xxh3(a.tobytes()) for a in arrays).encode()) for arrays in fragments]
    return xxh3("".join(each).encode())


# ---------------------------------------------------------------------- the grid


def grid(elements: int, align: int, least: int) -> list[tuple[int, int]]:
    size = max(least, (elements + 63) // 64)
    size = (size + align - 1) // align * align
    return [(at, min(at + size, elements)) for at in range(0, max(elements, 1), size)]


def cuts(shards: int, owners: int) -> list[int]:
    """Part j is the shards [cuts[j], cuts[j+1]): j·S/N in fp64, to the nearest whole number, ties to the even one."""
    return [int(np.rint(j * shards / owners)) for j in range(owners + 1)]


def span(codec: str, start: int, stop: int) -> slice:
    """The place of these elements in a body."""
    align, width = ROWS[codec]
    return slice(-(-start // align) * width, -(-stop // align) * width)


# ---------------------------------------------------------------------- bodies


def decode(codec: str, body: bytes, n: int) -> np.ndarray:
    """n elements, fp32.  Raises Unsound."""
    if codec == "bf16-gate":
        return _gated(body, n)
    align, width = ROWS[codec]
    if len(body) != -(-n // align) * width:
        raise Unsound(f"{len(body)} bytes for {n} elements")
    rows = np.frombuffer(body, np.uint8).reshape(-1, width)
    with np.errstate(over="ignore", invalid="ignore"):
        values = {"fp32": _fp32, "bf16": _bf16, "int8": _int8, "int4": _int4, "topk": _topk}[codec](rows)
    if not np.isfinite(values).all() or values[n:].any():
        raise Unsound("not finite, or values after the last element")
    return values[:n]


def _fp32(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(-1).view("<f4")


def _bf16(rows: np.ndarray) -> np.ndarray:
    return (rows.reshape(-1).view("<u2").astype("<u4") << 16).view("<f4")


def _scaled(codes: np.ndarray, rows: np.ndarray, levels: int) -> np.ndarray:
    scale = np.ascontiguousarray(rows[:, :4]).view("<f4")
    if not ((scale >= TINY) & (scale <= _largest(levels))).all():
        raise Unsound("a scale that no encoder writes")
    return (codes.astype(np.float32) * scale).reshape(-1)


def _int8(rows: np.ndarray) -> np.ndarray:
    return _scaled(rows[:, 4:].view(np.int8), rows, 127)


def _int4(rows: np.ndarray) -> np.ndarray:
    pair = rows[:, 4:].view(np.int8).astype(np.int32)
    low = ((pair + 8) & 15) - 8
    return _scaled(np.concatenate([low, (pair - low) >> 4], axis=1), rows, 7)


def _topk(rows: np.ndarray) -> np.ndarray:
    levels = _bf16(np.ascontiguousarray(rows[:, :4])).reshape(-1, 2)
    if not np.isfinite(levels).all() or (levels < 0).any():
        raise Unsound("levels that are negative or not finite")
    out = np.zeros((len(rows), 64, 128), np.float32)
    for table, entries, (low, high) in zip(out, rows[:, 4:].reshape(-1, 3, 128), levels, strict=True):
        place = entries & 63
        if (np.diff(place.astype(int), axis=0) <= 0).any():
            raise Unsound("places that do not ascend")
        for i in range(3):
            size = np.where(entries[i] >> 7, high, low)
            table[place[i], np.arange(128)] = np.where(entries[i] >> 6 & 1, -size, size)
    return out.reshape(-1)


def _gated(body: bytes, n: int) -> np.ndarray:
    out, at = np.zeros(n, np.float32), 0
    for start in range(0, n, GATE):
        m = min(GATE, n - start)
        if len(body) < at + 8:
            raise Unsound("it ends inside a header")
        count, size = struct.unpack_from("<II", body, at)
        values, where = at + 8, at + 8 + 4 * count
        at = where + (size + 3) // 4 * 4
        if count > m or size > (m + 7) // 8 or at > len(body):
            raise Unsound("a header that does not fit")
        coded = body[where : where + size]
        places = _from_bits(coded) if size == (m + 7) // 8 else _from_gaps(coded)
        found = np.frombuffer(body, "<f4", count, values)
        if len(places) != count or (count and places[-1] >= m) or not np.isfinite(found).all():
            raise Unsound("places or values that do not fit")
        out[start:][places] = found
    if at != len(body):
        raise Unsound("bytes after the last block")
    return out


def _from_bits(coded: bytes) -> list[int]:
    return [8 * i + bit for i, byte in enumerate(coded) for bit in range(8) if byte >> bit & 1]


def _from_gaps(coded: bytes) -> list[int]:
    places, here = list[int](), 0
    for gap in coded:
        here += gap
        if gap < 255:
            places.append(here)
            here += 1
    if coded and coded[-1] == 255:
        raise Unsound("it ends inside a gap")
    return places


def apply_patch(bits: np.ndarray, body: bytes) -> None:
    """Weights for engines: a part's values over the present ones, uint16."""
    while body:
        magic, start, count, changed, *sizes = struct.unpack_from("<4sQIIIII", body)
        assert magic == b"bf16" and changed <= count <= 1 << 22
        at, pieces = 32, list[bytes]()
        for size in sizes:
            pieces.append(body[at : at + size])
            at += size
        high, low = zlib.decompress(pieces[1], -15), pieces[2]
        places = [int(i) for i in _from_gaps(zlib.decompress(pieces[0], -15))] if pieces[0] else list(range(count))
        assert len(places) == len(high) == len(low) == changed and all(i < count for i in places)
        for place, a, b in zip(places, high, low, strict=True):
            bits[start + place] = a << 8 | b
        body = body[at:]


def _largest(levels: int) -> np.float32:
    return np.nextafter(np.float32(float(FLT_MAX) / levels), np.float32(0))


def encode(codec: str, s: np.ndarray, theta: np.ndarray | None = None) -> bytes:
    """The body of s by the page; not for topk."""
    if codec == "fp32":
        return s.tobytes()
    if codec == "bf16":
        return _narrow(s).tobytes()
    if codec == "bf16-gate":
        assert theta is not None
        blocks = range(0, s.size, GATE)
        return b"".join(_gate_block(s[a : a + GATE], theta[a : a + GATE]) for a in blocks)
    align, _ = ROWS[codec]
    table = np.pad(s, (0, -s.size % align)).reshape(-1, align)
    scale = np.abs(table).max(axis=1, keepdims=True) / np.float32(LEVELS[codec])
    scale = np.clip(scale, TINY, _largest(LEVELS[codec])).astype(np.float32)
    codes = np.rint(table * (np.float32(1) / scale)).astype(np.int32)
    if codec == "int4":
        codes = codes[:, :256] + 16 * codes[:, 256:]
    return np.concatenate([scale.view(np.uint8), codes.astype(np.int8).view(np.uint8)], axis=1).tobytes()


def _narrow(s: np.ndarray, most: int = 0x7F7FFFFF) -> np.ndarray:
    """fp32 -> the bits of bf16, to nearest even; most: bits of the largest magnitude, before the lower half goes."""
    bits = s.view(np.uint32).astype(np.int64)
    size = np.minimum((bits & 0x7FFFFFFF) + 0x7FFF + (bits >> 16 & 1), most)
    return ((bits & 0x80000000 | size) >> 16).astype("<u2")


def _gate_block(s: np.ndarray, theta: np.ndarray) -> bytes:
    places = np.flatnonzero(_narrow(theta, 0x7FFFFFFF) != _narrow(theta - s, 0x7FFFFFFF))  # may be infinite
    gaps = list[int]()
    for gap in np.diff(places, prepend=-1) - 1:
        gaps += [255] * (int(gap) // 255) + [int(gap) % 255]
    where = bytes(gaps)
    if len(where) >= (s.size + 7) // 8:
        bits = np.zeros(s.size, np.uint8)
        bits[places] = 1
        where = np.packbits(bits, bitorder="little").tobytes()
    pad = b"\0" * (-len(where) % 4)
    return struct.pack("<II", len(places), len(where)) + s[places].tobytes() + where + pad


@dataclass
class Residual:
    """The state that a sender keeps of one fragment: e, and for topk the rounds since each element was sent."""

    e: np.ndarray
    age: np.ndarray

    @classmethod
    def zeros(cls, n: int) -> "Residual":
        return cls(np.zeros(n, np.float32), np.zeros(n, np.uint8))

    def after(self, codec: str, x: np.ndarray, body: bytes) -> "Residual":
        """The residual that is kept when x was sent as `body`."""
        if codec == "fp32":
            return self
        sent = decode(codec, body, x.size)
        if codec != "topk":
            s = self.e + x
            return Residual(np.where(sent != 0, 0, s) if codec == "bf16-gate" else s - sent, self.age)
        e, age = self.e * np.float32(0.5) + x, np.minimum(self.age + 1, 8).astype(np.uint8)
        return Residual(e - sent / GAINS[age], np.where(sent != 0, 0, age).astype(np.uint8))


# ---------------------------------------------------------------------- the mean and the step


def mean_of(codec: str, bodies: list[bytes], weights: list[float], n: int, units: list[tuple[int, int]]) -> np.ndarray:
    """units: the grid's shards, or all elements as one where a body has no digests of shards."""
    out = _weighted([_decoded(codec, b, n) for b in bodies], weights, n)
    if out is not None:
        return out
    out = np.zeros(n, np.float32)
    for a, b in units:
        pieces = bodies if len(units) == 1 else [body[span(codec, a, b)] for body in bodies]
        decoded = [_decoded(codec, piece, b - a) for piece in pieces]
        good = [(x, w) for x, w in zip(decoded, weights, strict=True) if x is not None]
        if good:
            piece = _weighted([x for x, _ in good], [w for _, w in good], b - a, settle=True)
            assert piece is not None
            out[a:b] = piece
    return out


def _decoded(codec: str, body: bytes, n: int) -> np.ndarray | None:
    try:
        return decode(codec, body, n)
    except Unsound:
        return None


def _weighted(xs: list[np.ndarray | None], weights: list[float], n: int, *, settle: bool = False) -> np.ndarray | None:
    """( fl(w₁x₁) + fl(w₂x₂) + … ) / fl(Σw);  None if a body is unsound or, unless it is settled, the mean is."""
    total: np.ndarray | None = None
    with np.errstate(all="ignore"):
        for x, w in zip(xs, weights, strict=True):
            if x is None:
                return None
            term = np.float32(w) * x
            total = term if total is None else total + term
        if total is None:
            return None
        mean = total / np.float32(sum(weights))
    if settle:
        mean[~np.isfinite(mean)] = 0
    return mean if np.isfinite(mean).all() else None


def weights_of(commit: dict[str, Any], rules: dict[str, Any]) -> list[tuple[float, float]]:
    """(weight, factor) of each listed offer."""
    offers, limit = commit["offers"], rules["norm_gate"]
    long = [o for o in offers if o["norm"] > 0]
    weighed = list[tuple[float, float]]()
    for o in offers:
        share = o["h"] / rules["sync_every"]
        if rules["weighting"] == "uniform":
            share = 1.0
        elif rules["weighting"] == "samples" and all(p["samples"] > 0 for p in offers):
            share = o["samples"] / max(p["samples"] for p in offers)
        factor, discount = 1.0, 1.0
        if limit > 0 and len(long) >= 3:
            typical = max(median(p["norm"] for p in long), median(p["norm"] / p["h"] for p in long) * o["h"])
            if o["norm"] > limit * max(typical, 0.01 * median(p["scale"] for p in long)):
                factor = float(np.float32(typical / o["norm"]))
        for _ in range((commit["t"] - o["step"]) // rules["fragments"]):
            discount *= rules["age_discount"]
        weighed.append((float(np.float32(share * discount * factor)), factor))
    return weighed


def nesterov(theta: np.ndarray, m: np.ndarray, mean: np.ndarray, lr: float, mu: float) -> None:
    """In place.  A mean of zeros is not a round."""
    if mean.any():
        m[:] = m * np.float32(mu) + mean
        theta[:] = theta - (m * np.float32(mu) + mean) * np.float32(lr)


# ---------------------------------------------------------------------- a run


@dataclass
class Replay:
    """bases[t], thetas[t]: before commit t.   commits: as they were read.   sharded: steps reduced in parts."""

    bases: list[str] = field(default_factory=list)
    thetas: list[list[np.ndarray]] = field(default_factory=list)
    commits: list[dict[str, Any]] = field(default_factory=list)
    sharded: list[int] = field(default_factory=list)


class Folder:
    """A run's folder, its records without tags.   secret: the run key, b"" for a run without one."""

    def __init__(self, root: Path, secret: bytes = b"") -> None:
        self._root, self._secret, self._run = root, secret, ""
        if secret:
            self._run = json.loads(self.record("seal.json"))["nonce"]

    def record(self, key: str) -> bytes:
        body = (self._root / key).read_bytes()
        return unsealed(body, self._secret, self._run, key) if self._secret else body

    def has(self, key: str) -> bool:
        return (self._root / key).exists()

    def blob(self, record: dict[str, Any], shards: list[slice] | None = None) -> bytes:
        """The blob that a record names.   shards: where the pieces are that it may have a digest of, each."""
        body, digests = (self._root / record["blob"]).read_bytes(), record.get("shards") or []
        whole, sealed = "".join(digests).encode() if digests else body, bool(self._secret)
        assert len(body) == record["size"] and is_named(whole, record["digest"], sealed=sealed), record
        for piece, name in zip(shards or [], digests, strict=True) if digests else ():
            assert is_named(body[piece], name, sealed=sealed), record
        return body


def replay(root: Path, rules: dict[str, Any], secret: bytes = b"") -> Replay:
    """rules: what run.json says under mathematics.outer."""
    folder, found, fragments = Folder(root, secret), Replay(), rules["fragments"]
    start = json.loads(folder.record(f"snapshots/{0:010d}/manifest.json"))
    arrays = safetensors(folder.blob(start))
    theta = [arrays[f"theta.{f}"] for f in range(fragments)]
    state = [[t, arrays.get(f"momentum.{f}", np.zeros_like(t))] for f, t in enumerate(theta)]
    prev = None
    while True:
        t = len(found.commits)
        found.bases.append(base_of(state))
        found.thetas.append([theta.copy() for theta, _ in state])
        key = f"steps/{t:010d}/commit.json"
        if not folder.has(key):
            return found
        body, (theta, m) = folder.record(key), state[t % fragments]
        commit = json.loads(body)
        assert canonical(commit) == body and commit["prev"] == prev and commit["base"] == found.bases[t], key
        _check_offers(folder, commit, found)
        found.commits.append(commit)
        assert [(o["weight"], o["factor"]) for o in commit["offers"]] == weights_of(commit, rules), key
        nesterov(theta, m, _mean(folder, commit, rules, theta.size, found), rules["lr"], rules["momentum"])
        prev = digest(body, "sha256")


def _check_offers(folder: Folder, commit: dict[str, Any], found: Replay) -> None:
    """Each listed offer stands under its slot's key, started from its step's base, and is counted once."""
    before = {(o["step"], o["slot"]) for c in found.commits for o in c["offers"]}
    for listed in commit["offers"]:
        attempt, step, slot = 0, listed["step"], listed["slot"]
        while True:
            offer = json.loads(folder.record(f"steps/{step:010d}/offer/{slot}.{attempt}.json"))
            if offer["nonce"] == listed["nonce"]:
                break
            attempt += 1
        assert all(offer[name] == listed[name] for name in set(offer) & set(listed) - {"kind", "wire"})
        assert offer["base"] == found.bases[step] and (step, slot) not in before


def _mean(folder: Folder, commit: dict[str, Any], rules: dict[str, Any], n: int, found: Replay) -> np.ndarray:
    codec, offers = rules["codec"], commit["offers"]
    align = ROWS[codec][0] if codec in ROWS else GATE
    shards = grid(n, align, rules.get("shard_elements", 1 << 16))
    slices = [span(codec, a, b) for a, b in shards] if codec in ROWS else []
    fitting = [o for o in offers if _fits(codec, o["size"], n) and len(o["shards"]) in (0, len(shards))]
    bodies = [folder.blob(o, slices) for o in fitting]
    units = shards if all(o["shards"] for o in offers) else [(0, n)]
    mean = mean_of(codec, bodies, [o["weight"] for o in fitting], n, units)
    if commit["mode"] == "sharded":
        found.sharded.append(commit["t"])
        _through_parts(folder, commit, codec, shards, mean)
    elif folder.has(key := f"steps/{commit['t']:010d}/mean/0000.json"):
        record = json.loads(folder.record(key))
        assert folder.blob(record) == mean.tobytes(), key
    return mean


def _fits(codec: str, size: int, n: int) -> bool:
    if codec in ROWS:
        return size == span(codec, 0, n).stop
    blocks = [min(GATE, n - a) for a in range(0, n, GATE)]
    return size <= sum(8 + 4 * m + ((m + 7) // 8 + 3) // 4 * 4 for m in blocks)


def _through_parts(
    folder: Folder, commit: dict[str, Any], codec: str, shards: list[tuple[int, int]], mean: np.ndarray
) -> None:
    """Each part is written by the codec once more; all use what that says.  What was announced is that."""
    at = cuts(len(shards), len(commit["owners"]))
    for j, (first, last) in enumerate(pairwise(at)):
        if first == last:
            continue
        piece = mean[shards[first][0] : shards[last - 1][1]]
        body = encode(codec, piece)
        piece[:] = decode(codec, body, piece.size)
        key = f"steps/{commit['t']:010d}/mean/{j:04d}.json"
        if folder.has(key):
            record = json.loads(folder.record(key))
            assert folder.blob(record) == body, key
