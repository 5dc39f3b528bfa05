"""`diloco doctor URL`: can this store carry a run, and what would one sync of this model take and cost?

    URL ──▶ rendezvous.probe ──▶ table, yes or no
    run.toml ──▶ parameters of its model, bytes of each on the wire, replicas ──▶ three more rows

Parameters are counted without loading a model: from the headers of its files, here or on the Hub.
Not promised: the price of a store that is not S3 or R2; that a sync takes what was measured on a quiet minute.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from math import prod
from pathlib import Path

from diloco.config import ConfigError, RunConfig, load_config
from rendezvous.clock import SystemClock
from rendezvous.codecs import nominal_ratio
from rendezvous.probe import doctor_table, probe
from rendezvous.store import Store, open_store
from rendezvous.stores.files import FileStore

BUILT_IN = {"tiny": 99_200, "toolworld": 97_984}  # as they come
REPLICAS = 4
BLOB = 32 << 20  # bytes that are timed, at most: a small model needs less


def doctor(url: str, parameters: int | None, config: str | None, replicas: int | None) -> tuple[str, bool]:
    """(the table, can it carry a run).  Raises what the store says if it lets us do nothing at all."""
    settings = load_config(config) if config else None
    width = 4.0
    if settings is not None:
        parameters, replicas = parameters_of(settings), replicas or settings.fleet.replicas
        width = 4.0 / nominal_ratio(settings.outer.codec)
    store = open_store(url)
    with _left_as_it_was(store):
        seen = probe(store, SystemClock(), BLOB)
    return doctor_table(seen, parameters, replicas or REPLICAS, width), seen.verdict() is None


def parameters_of(config: RunConfig) -> int:
    """How many parameters the run's model has.  Raises ConfigError."""
    model = config.inner.model
    if model in BUILT_IN:
        return BUILT_IN[model]
    if Path(model).is_dir():
        return sum(_parameters_in(path) for path in _weights(Path(model)))
    return _parameters_on_the_hub(model, config.inner.revision)


def _weights(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(f"{folder} holds no .safetensors file to count parameters in; give --parameters N instead")
    return found


def _parameters_in(path: Path) -> int:
    """From the header: 8 bytes of length, then JSON."""
    with open(path, "rb") as f:
        header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
    return sum(prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")


def _parameters_on_the_hub(model: str, revision: str | None) -> int:
    from huggingface_hub import get_safetensors_metadata

    try:
        counts = get_safetensors_metadata(model, revision=revision).parameter_count
    except Exception as error:  # no network, no such model, a private one, no safetensors: the advice is the same
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"cannot count the parameters of {model}: {why}. Give --parameters N instead") from None
    return sum(counts.values())


@contextmanager
def _left_as_it_was(store: Store) -> Iterator[None]:
    """A folder keeps none of the empty folders that the probe made in it."""
    if not isinstance(store, FileStore):
        yield
        return
    root = store.root
    new = [p for p in (root / ".tmp", root / "probe", root, *root.parents) if not p.exists()]
    try:
        yield
    finally:
        for path, _, _ in os.walk(root / "probe", topdown=False):
            _remove_if_empty(Path(path))
        for path in new:
            _remove_if_empty(path)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
