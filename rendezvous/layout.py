"""Layout of the bucket.  All keys are built and parsed in this file.

    {run}/
    ├── seal.json                                  in a run under a key: its records are sealed    put_once
    ├── run.json                                   the run's shared settings and parameter layout  put_once
    ├── script.json                                the same for a launched script, when it joins   put_once
    ├── code/{digest}/{name}                       the user's own files, as launched               put_once
    ├── model/{name}                               θ₀'s folder; manifest.json goes last            put_once
    ├── replicas/{slot}/{generation:06d}.json      the slot's holder; a higher generation fences  put_once
    ├── alive/{slot}.json                          heartbeat; advisory                             put, by its slot
    ├── steps/{t:010d}/
    │   ├── delta/{slot}-{generation}-{nonce}.bin  a pseudogradient                                put, new name
    │   ├── offer/{slot}.{attempt}.json            "my delta for t"                                put_once
    │   ├── commit.json                            THE decision: offers that count, their weights  put_once
    │   └── mean/{shard:04d}.json, {nonce}.bin     the mean, announced with its digest             put_once
    ├── snapshots/{t:010d}/
    │   └── manifest.json, {nonce}.safetensors     θ_t and outer momentum                          put_once
    ├── leave/{slot}-{generation}.json             the leave record of a replica                   put_once
    ├── residuals/{slot}-{generation}-{nonce}.bin  its codec's residual; the next generation deletes it  put, new name
    ├── control/{n:06d}.json                       the desired state                               put_once, dense
    ├── rollouts/{slot}/{g:010d}/
    │   ├── {bundle:04d}.{attempt}.{rollout:04d}.{name}.reward   of one rollout, after its step        put_once
    │   └── {bundle:04d}.{attempt}.bundle, {bundle:04d}.{attempt}.verdict   a generation's rollouts; a check  put_once
    ├── weights/{t:010d}/
    │   └── manifest.json, {nonce}-{part:04d}.bin  θ_t in bf16, or what differs from θ_{t−1}       put_once
    ├── again/                                     a whole run, which counts instead of this one if this was superseded
    ├── page/index.html, data/{n}.json             a view for browsers; no replica reads it        put, by a publisher
    └── log/{slot}-{generation}/
        ├── {n:06d}.jsonl                          metrics and events                              put, by its slot
        └── {n:06d}.rollouts.jsonl                 a few of the student's rollouts, for traces     put, by its slot

Zero-padded numbers sort by their value.  A register (put_once) is never deleted during a run: a replica that was
suspended could otherwise write it a second time.

Every key, and every file name in a manifest, is *plain*: printable parts with one "/" between them, and no part is "."
or "..".  So a key that is joined to a folder stays inside that folder.

Not promised: that a key listed under `alive/` belongs to a living process.
"""

import re

SEAL = "seal.json"
RUN = "run.json"
SCRIPT = "script.json"  # a launched script's outer settings and parameters
MODEL_MANIFEST = "model/manifest.json"
SNAPSHOTS = "snapshots/"
STEPS, LEAVES, LOGS = "steps/", "leave/", "log/"
CONTROLS = "control/"
AGAIN = "again"  # a folder: the run that has superseded this run, if it was superseded
CLAIMS = "replicas/"
ROLLOUTS = "rollouts/"  # whole generations, for replacements and audits
WEIGHTS = "weights/"  # for inference engines; no replica reads them
PAGE = "page/"  # a view of the run; it may be overwritten and deleted at any time
PAGE_INDEX = "page/index.html"
TOP = (  # names of the files and folders that a run's folder may contain
    SEAL, RUN, SCRIPT, "code", "model", "replicas", "alive", "steps", "snapshots", "leave", "residuals", "control",
    "rollouts", "weights", AGAIN, "page", "log",
)  # fmt: skip
_CONTENT_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json"}
_DRIVE = re.compile("[A-Za-z]:")
SUPERVISOR = "supervisor"  # stands for a slot's name in the keys of a supervisor's claims and heartbeats
MOST_SLOTS = 10_000  # a record that names more slots is refused: replicas would search for each of them
# delta_blob, mean_blob, snapshot_blob: (step, kind), or the third group for a snapshot's step
BLOB = re.compile(r"steps/([0-9]{10})/(delta|mean)/[^/]*\.bin|snapshots/([0-9]{10})/[^/]*\.safetensors")
_WORD = re.compile("[A-Za-z0-9_]+")
_MANIFESTS = {"snapshots": "snapshot", "weights": "weights"}
_SINGLE = {SEAL: "seal", RUN: "run", SCRIPT: "run", MODEL_MANIFEST: "model"}
_KIB, _MIB = 1 << 10, 1 << 20
# maximal number of bytes of a record, by kind; a longer record is neither read to its end nor parsed
MOST_BYTES = {
    "run": 16 * _MIB,  # contains the parameter layout of a user's own training loop
    "model": 64 * _MIB,  # 100 bytes for each of some 100,000 parameters, and the names of files
    "offer": 256 * _KIB,  # 64 digests of shards are 5 KiB; the rest is for statistics
    "commit": 32 * _MIB,  # 5 KiB for each offer that is listed: 256 slots with three late ones each are 5 MiB
    "weights": 64 * _MIB,  # an anchor's parameter layout
    "control": 256 * _KIB,  # a record's places contain environments and options
    "log": 64 * _MIB,  # a few rounds of events, or of rollouts
    "rollouts": 1024 * _MIB,  # 9 bytes per token: 512 rollouts of 200,000 tokens
}
MOST_OF_OTHERS = 16 * _KIB  # bytes of any other record: a few numbers and names
MOST_OF_FILES = 1 << 40  # bytes of a file that a record names by its digest: the user's, θ₀'s, residuals
_SEALED = 256  # bytes that a tag adds
_FOLDERS = {
    "replicas": "claim", "alive": "beat", "leave": "leave", "control": "control", "log": "log", "rollouts": "rollouts",
}  # fmt: skip


def is_plain(name: str) -> bool:
    """Whether a name, joined to a folder, stays inside it.  Not: "/x", "../x", "a//b", "C:x", "a\\b", "a\\0"."""
    parts_are_real = all(part not in ("", ".", "..") for part in name.split("/"))
    return parts_are_real and name.isprintable() and "\\" not in name and not _DRIVE.match(name)


def is_blob(key: str, pattern: str) -> bool:
    """Whether `key`, which a record names, is a blob's key.

    pattern: the key of a blob with the nonce "", as this file builds it.
    """
    stem, _, ending = pattern.rpartition(".")
    return is_plain(key) and key.startswith(stem) and key.endswith(f".{ending}") and "/" not in key[len(stem) :]


def slot_name(index: int) -> str:
    """Return the name of a slot: 0 -> "r00".  The numbers have no gaps, so GETs find all slots."""
    return f"r{index:02d}"


def slot_index(slot: str) -> int:
    """Return the index of a slot: "r07" -> 7.   Raise ValueError for any other name."""
    if not is_slot(slot):
        raise ValueError(f"{slot!r} is not a slot name; slots are called r00, r01, ...")
    return int(slot[1:])


def is_slot(name: str) -> bool:
    """Whether `name` is a slot's name.  "r7" and "r007" are not: each slot has one spelling only, here "r07"."""
    return name.startswith("r") and is_member(name)


def actor_name(index: int) -> str:
    return f"a{index:02d}"


def is_actor(name: str) -> bool:
    return name.startswith("a") and is_member(name)


def is_member(name: str) -> bool:
    """Whether `name` is a slot's name, or an actor's: "a07"."""
    digits = name[1:]
    number = digits.isascii() and digits.isdigit() and len(digits) <= 5
    return name[:1] in ("r", "a") and number and slot_name(int(digits))[1:] == digits


def is_word(name: str) -> bool:
    """Whether `name` may be used in place of a slot in a key."""
    return _WORD.fullmatch(name) is not None


def code_key(digest: str, name: str) -> str:
    return f"code/{digest}/{name}"


def model_file(name: str) -> str:
    return f"model/{name}"


def is_model_file(key: str) -> bool:
    return is_plain(key) and key.startswith("model/") and key != MODEL_MANIFEST


def claim_key(slot: str, generation: int) -> str:
    return f"replicas/{slot}/{generation:06d}.json"


def claim_owner(key: str) -> tuple[str, int]:
    """Return slot and generation of a claim's key: replicas/r01/000002.json -> ("r01", 2)."""
    _, slot, name = key.split("/")
    return slot, int(name.partition(".")[0])


def beat_key(slot: str) -> str:
    return f"alive/{slot}.json"


def delta_blob(t: int, slot: str, generation: int, nonce: str) -> str:
    return f"steps/{t:010d}/delta/{slot}-{generation}-{nonce}.bin"


def offer_key(t: int, slot: str, attempt: int) -> str:
    return f"steps/{t:010d}/offer/{slot}.{attempt}.json"


def offers_prefix(t: int) -> str:
    """Return the prefix of the keys of step t's offers."""
    return f"steps/{t:010d}/offer/"


def offer_slot(key: str) -> str:
    """Return the slot of an offer's key: steps/0000000005/offer/r01.0.json -> "r01"."""
    return key.rpartition("/")[2].partition(".")[0]


def commit_key(t: int) -> str:
    return f"steps/{t:010d}/commit.json"


def commit_step(key: str) -> int:
    """Return the step of a commit's key: steps/0000000007/commit.json -> 7."""
    return int(key.split("/")[1])


def mean_key(t: int, shard: int) -> str:
    return f"steps/{t:010d}/mean/{shard:04d}.json"


def mean_blob(t: int, nonce: str) -> str:
    return f"steps/{t:010d}/mean/{nonce}.bin"


def snapshot_key(t: int) -> str:
    return f"{SNAPSHOTS}{t:010d}/manifest.json"


def snapshot_blob(t: int, nonce: str) -> str:
    return f"{SNAPSHOTS}{t:010d}/{nonce}.safetensors"


def snapshot_step(key: str) -> int | None:
    """Return the step of a snapshot's manifest key; None for any other key below `snapshots/`."""
    step = _number_after_folder(key)
    return step if key == snapshot_key(step) else None


def weights_key(t: int) -> str:
    return f"{WEIGHTS}{t:010d}/manifest.json"


def weights_blob(t: int, nonce: str) -> str:
    return f"{WEIGHTS}{t:010d}/{nonce}.bin"


def weights_step(key: str) -> int | None:
    """Return the step of a weights manifest's key; None for any other key below `weights/`."""
    step = _number_after_folder(key)
    return step if key == weights_key(step) else None


def _number_after_folder(key: str) -> int:
    """Return the number in the second part of a key of three parts, or -1 without a number."""
    parts = key.split("/")
    return int(parts[1]) if len(parts) == 3 and _is_number(parts[1]) else -1


def control_number(key: str) -> int | None:
    """Return the number of a control record's key: control/000003.json -> 3; None for any other key."""
    number = key.removeprefix(CONTROLS).removesuffix(".json")
    return int(number) if _is_number(number) and key == control_key(int(number)) else None


def claimed_slot(key: str) -> str | None:
    """Return the slot, or actor, of a claim's key: replicas/r01/000002.json -> "r01"; None for any other key."""
    parts = key.split("/")
    return parts[1] if len(parts) == 3 and is_member(parts[1]) else None


def leave_key(slot: str, generation: int) -> str:
    return f"leave/{slot}-{generation}.json"


def residual_blob(slot: str, generation: int, nonce: str) -> str:
    return f"residuals/{slot}-{generation}-{nonce}.bin"


def control_key(n: int) -> str:
    return f"control/{n:06d}.json"


def log_key(slot: str, generation: int, n: int) -> str:
    return f"{LOGS}{slot}-{generation}/{n:06d}.jsonl"


def logs_prefix(slot: str, generation: int) -> str:
    """Return the prefix of the log keys of one generation of a slot."""
    return f"{LOGS}{slot}-{generation}/"


def rollouts_key(slot: str, generation: int, n: int) -> str:
    return f"{LOGS}{slot}-{generation}/{n:06d}.rollouts.jsonl"


def bundle_key(slot: str, generation: int, bundle: int, attempt: int) -> str:
    return f"{ROLLOUTS}{slot}/{generation:010d}/{bundle:04d}.{attempt}.bundle"


def beside_bundle(bundle: str, ending: str) -> str:
    """Return the key of a record about a bundle.   ending: "verdict", or "0003.human.reward": of its rollout 3."""
    return bundle.removesuffix("bundle") + ending


def bundle_place(key: str) -> tuple[int, int] | None:
    """Return generation and number of a bundle's key: rollouts/r01/0000000042/0003.0.bundle -> 42, 3; else None."""
    parts = key.split("/") if key.endswith(".bundle") else []
    number = parts[3].partition(".")[0] if len(parts) == 4 else ""
    return (int(parts[2]), int(number)) if _is_number(number) and _is_number(parts[2]) else None


def is_rollouts(key: str) -> bool:
    return key.endswith(".rollouts.jsonl")


def log_owner(key: str) -> tuple[str, int] | None:
    """Return slot and generation of a log's key: log/r01-2/000003.jsonl -> ("r01", 2); None for any other key."""
    parts = key.split("/")
    slot, _, generation = parts[1].rpartition("-") if len(parts) == 3 else ("", "", "")
    named = _is_number(parts[-1].partition(".")[0]) and parts[-1].endswith(".jsonl")
    return (slot, int(generation)) if named and is_word(slot) and _is_number(generation) else None


def log_number(key: str) -> int:
    """Return the number in a log's key: log/r01-2/000003.jsonl -> 3.  Only for keys with a `log_owner`."""
    return int(key.rpartition("/")[2].partition(".")[0])


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def page_data_key(name: str) -> str:
    """Return the key of a published page's data; `name` is "head.json", "0.json", …"""
    return f"{PAGE}data/{name}"


def content_type(key: str) -> str | None:
    """Return the Content-Type of an object; None for keys that no browser reads."""
    return _CONTENT_TYPES.get("." + key.rpartition(".")[2]) if key.startswith(PAGE) else None


def record_kind(key: str) -> str | None:
    """Return the kind of the record under `key`: claim, offer, …, beat, log; None for a blob, which is not sealed."""
    if key in _SINGLE:
        return _SINGLE[key]
    parts = key.split("/")
    if parts[0] == "rollouts" and key.endswith((".verdict", ".reward")):
        return key.rpartition(".")[2]
    if parts[0] in _FOLDERS:
        return _FOLDERS[parts[0]]
    if parts[0] in _MANIFESTS:
        return _MANIFESTS[parts[0]] if parts[-1] == "manifest.json" else None
    if parts[0] == "steps" and parts[-1].endswith(".json"):
        return "commit" if parts[-1] == "commit.json" else parts[2]
    return None


def most_bytes(key: str) -> int:
    """Return how many bytes the object under `key` may have; a longer object is not the run's."""
    kind = record_kind(key)
    return MOST_OF_FILES if kind is None else MOST_BYTES.get(kind, MOST_OF_OTHERS) + _SEALED
