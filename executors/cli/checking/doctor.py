"""`diloco doctor URL`: checks whether a store can carry a run, and estimates time and price of one sync of a model.

    URL ──▶ rendezvous.engine.probe ──▶ table, yes or no
    run.toml ──▶ parameters of its model, codec, replicas ──▶ bytes, time and price of a sync
                                                         └──▶ the choice of codec = "auto", and its reason

Not promised: prices of stores other than S3 and R2; that a sync under load is as fast as the measurement.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diloco.run.config import AUTO, OuterConfig, load_config
from diloco.run.sizing import codec_for, compute_seconds, compute_seconds_of, parameters_of, trained_parameters_of
from rendezvous.clock import SystemClock
from rendezvous.engine.probe import doctor_table, probe_store
from rendezvous.store import Store
from rendezvous.stores.files import FileStore
from rendezvous.stores.open import open_store

REPLICAS = 4
BLOB = 32 << 20  # bytes: the largest transfer that `doctor` times


def doctor(url: str, parameters: int | None, config: str | None, replicas: int | None) -> tuple[str, bool]:
    """Return (the table, whether the store can carry a run).  Raise the store's error if it refuses everything."""
    settings = load_config(config) if config else None
    codec = "fp32"
    compute_s = 0.0
    if settings is not None:
        whole = parameters_of(settings)
        parameters = trained_parameters_of(settings) or whole
        replicas = replicas or settings.fleet.replicas
        codec = settings.outer.codec
        compute_s = compute_seconds_of(settings, whole)
    elif parameters is not None:
        compute_s = compute_seconds(parameters, OuterConfig().sync_every)
    store = open_store(url)
    n = replicas or REPLICAS
    with _left_as_it_was(store):
        seen = probe_store(store, SystemClock(), BLOB)
    why = ""
    if parameters is not None and seen.put_bytes_s:
        chosen, why = codec_for(parameters, n, seen.put_bytes_s, seen.get_bytes_s, compute_s)
        codec = chosen if codec == AUTO else codec
        why = f"{chosen}: {why}"
    return doctor_table(seen, parameters, n, codec, why), seen.why_unfit() is None


@contextmanager
def _left_as_it_was(store: Store) -> Iterator[None]:
    """Remove the empty folders that the probe makes if the store is a folder."""
    if not isinstance(store, FileStore):
        yield
        return
    root = store.root
    new = [p for p in (root / ".tmp", root / "probe", root, *root.parents) if not p.exists()]
    try:
        yield
    finally:
        store.close()
        for path, _, _ in os.walk(root / "probe", topdown=False):
            _remove_if_empty(Path(path))
        for path in new:
            _remove_if_empty(path)


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
