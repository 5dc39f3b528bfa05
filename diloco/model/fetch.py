"""Fetch a replica's files from the bucket: the start model's folder and the user's files.

    fetch_model(store, record, folder)   θ₀'s folder, from the bucket or from the Hub; each file's digest is checked
    fetch_files(run, folder)             reward.py, prompts.jsonl …

Not promised: space on this machine's disk.
"""

from collections.abc import Mapping
from pathlib import Path

from diloco.run.record import ModelRecord, Run
from rendezvous.errors import BadKey, Corrupt
from rendezvous.records.digests import SHA256, digest, has_digest, hex_of
from rendezvous.store import Store, plain_key


def fetch_model(store: Store, record: ModelRecord, folder: Path) -> Path:
    """Fetch θ₀ from the bucket or the Hub as a normal from_pretrained folder. Return `folder`.   Raises HubError."""
    if (model := record.hub_model) is not None:
        from inner.models.hub_model import link_hub_files

        link_hub_files(model, folder)
    for name, stored in record.files.items():
        if stored["key"]:
            save_below(folder, name, fetch_stored(store, stored))
    return folder


def is_weights_file(name: str) -> bool:
    """Whether a start model's file has weights or their index: safetensors, or PyTorch's format on the Hub."""
    return name.endswith((".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json"))


def fetch_files(run: Run, folder: Path) -> dict[str, Path]:
    """Download the user's files and check them against run.json. Return setting -> local path."""
    local: dict[str, Path] = {}
    for setting, stored in run.record.files.items():
        name = f"{hex_of(stored['digest'])}/{stored['key'].rpartition('/')[2]}"
        local[setting] = save_below(folder, name, fetch_stored(run.store, stored))
    return local


def fetch_stored(store: Store, stored: Mapping[str, str]) -> bytes:
    """Read a file, check its digest and return the checked bytes.   stored: key and digest.

    Raises Corrupt if none of three reads has this digest."""
    body: bytes | None = None
    for _ in range(3):
        body = store.get(stored["key"])
        if body is not None and has_digest(body, stored["digest"], SHA256):
            return body
    raise Corrupt(
        f"{stored['key']} is missing or damaged: announced digest {stored['digest']}, "
        f"found {'nothing' if body is None else digest(body, SHA256)}. Restore it, or start a new run"
    )


def save_below(folder: Path, name: str, body: bytes) -> Path:
    """Write folder/name and return its path.   Raises BadKey if a name or a link leads out of `folder`."""
    path = folder / plain_key(name)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise BadKey(f"{name!r} leads out of {folder}, through a link in that folder; use an empty folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body)
    return path
