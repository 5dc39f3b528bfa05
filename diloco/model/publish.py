"""Put the start model into the bucket, in a child process of the launcher, because it needs torch and memory.

    publish    model/{nonce}/… and then model/manifest.json: θ₀'s folder and the parameter layout
               for a model on the Hub, only the manifest: its commit and digests (start_model.py)
               with [inner.lora], the adapter, model/{nonce}/adapter/…, and its layout

Not promised: a single upload.  Two launchers may both upload; the first manifest is valid.
"""

import shlex
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from diloco.model.fetch import fetch_files
from diloco.process.disk import is_full
from diloco.run.config import ConfigError
from diloco.run.record import ModelRecord, Run, read_model, read_run
from inner import InnerConfig
from inner.models.naming import is_hub_name
from inner.settings.inner import BUILT_IN_MODELS
from rendezvous import layout
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import GaveUp, RendezvousError
from rendezvous.records.digests import SHA256, digest, required_digest_kind
from rendezvous.records.records import new_nonce
from rendezvous.store import PatientStore, Store, put_once

PUBLISH_PATIENCE_S = 20.0


def publish(url: str) -> int:
    """Put θ₀ into the bucket unless it is there. Return an exit code: this is a child process's entry point."""
    from diloco.process import exitcodes
    from inner import InnerError

    clock = SystemClock()
    try:
        run = read_run(url)
        publish_model(replace(run, store=PatientStore(run.store, clock, PUBLISH_PATIENCE_S)), clock)
    except GaveUp as error:
        print(f"cannot publish the model: {error}", file=sys.stderr, flush=True)
        return exitcodes.GAVE_UP
    except (InnerError, ConfigError) as error:  # an error in the user's files or settings, not in the model
        print(error, file=sys.stderr, flush=True)
        return exitcodes.USER_ERROR
    except (RendezvousError, OSError, SafetensorError) as error:
        from diloco.process.full_disk import full_disk_words

        full = full_disk_words(error, "it") if is_full(error) else ""
        words = f"{full}; free some space, then `diloco resume RUN`" if full else error
        print(f"cannot publish the model: {words}", file=sys.stderr, flush=True)
        return exitcodes.GAVE_UP if full else exitcodes.USER_ERROR
    return exitcodes.DONE


def publish_model(run: Run, clock: Clock) -> ModelRecord:
    """Build or load the start model, check the user's code, upload files that the Hub lacks, then the manifest."""
    if (stands := read_model(run)) is not None:  # RecordsLost: the folder may hold other weights by now
        return stands
    if run.record.parent.url:
        raise ConfigError(
            f"{run.url} continues from {run.record.parent}, whose model was not copied to the end. Repeat the command "
            f"that founded it: diloco train … --from {shlex.quote(str(run.record.parent))}"
        )
    import inner

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        files = fetch_files(run, folder / "code")
        if run.config.inner.named_files:
            inner.check_inner(run.config.inner, files, steps=run.config.fleet.steps * run.config.outer.interval)
        mine = _start_model(run, folder, clock)
        _check_start(run, files, folder)
    _, value = put_once(run.store, clock, layout.MODEL_MANIFEST, mine.encode())
    return ModelRecord.decode(value)


def _check_start(run: Run, files: Mapping[str, Path], scratch: Path) -> None:
    """Check a start model, unless it is built in or a local folder.

    Raises InnerError for a model that no replica could train."""
    config = run.config.inner
    if config.model in BUILT_IN_MODELS or Path(config.model).is_dir():
        return
    from inner.train.dry_run import check_start

    made, hub = scratch / "model", scratch / "hub"
    held_out = run.config.eval.source if run.config.eval is not None else None
    check_start(config, files, made if made.exists() else hub, held_out)


def _start_model(run: Run, scratch: Path, clock: Clock) -> ModelRecord:
    """Return a record that names the Hub's model if all replicas get the same bits from it; else upload the model."""
    config = run.config.inner
    if not is_hub_name(config.model):
        return _carry_model(run, config, scratch / "model", clock)
    from inner.models.hub_model import link_hub_files, pin_hub_model
    from inner.models.lora import ADAPTER, new_adapter, save_adapter
    from inner.train.build import base_of, load_start

    if (found := pin_hub_model(config)) is None:
        return _carry_model(run, config, scratch / "model", clock)
    folder = link_hub_files(found, scratch / "hub")
    model, drawn = load_start(folder, config.dtype, base=base_of(config.lora), source=found.name)
    if drawn:  # the head is in no file: every replica would draw another head
        return _carry_model(run, replace(config, model=str(folder), revision=None), scratch / "model", clock)
    files = {name: {"key": "", "digest": f"{SHA256}:{digits}"} for name, digits in found.files.items()}
    if config.lora is not None:
        model = new_adapter(model, config.lora, found.name, found.commit)
        save_adapter(model, scratch / "made" / ADAPTER)
        files |= upload_folder(run.store, scratch / "made")
    return _describe_model(run, model, files, clock, {"model": found.name, "commit": found.commit})


def _carry_model(run: Run, config: InnerConfig, folder: Path, clock: Clock) -> ModelRecord:
    import inner
    from inner.train.build import load_start

    inner.publish_model(config, folder)
    model, _ = load_start(folder, config.dtype, config.lora)
    return _describe_model(run, model, upload_folder(run.store, folder), clock)


def _describe_model(
    run: Run, model: Any, files: dict[str, dict[str, str]], clock: Clock, hub: Mapping[str, str] | None = None
) -> ModelRecord:
    from diloco.model.start_model import theta_digest
    from diloco.outer.flat import layout_of

    if faulty := [name for name, p in model.named_parameters() if not p.isfinite().all()]:
        from inner.models.drawn import refuse_not_finite

        refuse_not_finite(run.config.inner.model, faulty)
    theta = theta_digest(model, required_digest_kind(run.store))
    base = ""
    if run.config.inner.lora is not None:
        from diloco.outer.frozen import frozen_digest

        base = frozen_digest(model)
    return ModelRecord(files, layout_of(model), new_nonce(), clock.wall(), hub=dict(hub or {}), theta=theta, base=base)


def upload_folder(store: Store, folder: Path) -> dict[str, dict[str, str]]:
    """Put a folder's files into the bucket.   Return name -> key and digest, as a ModelRecord has them."""
    mark = new_nonce()
    files: dict[str, dict[str, str]] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        body = path.read_bytes()
        files[name] = {"key": layout.model_file(f"{mark}/{name}"), "digest": digest(body, SHA256)}
        store.put(files[name]["key"], body)
    return files
