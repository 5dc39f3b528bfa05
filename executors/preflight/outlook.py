"""Makes the forecast of `diloco plan`: price, memory, bytes and seconds, also of a run that does not exist yet.

    --run URL     desired state and costs from the bucket; a bucket that does not answer is a note, not an error
    no --run      places and budget as typed; the price is the same

Not promised: facts that only the bucket has (another config, or earlier costs).
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as Late
from dataclasses import dataclass, field
from typing import Any, TypeVar

from diloco.run.config import ConfigError, RunConfig
from diloco.run.footprint import footprint, lines
from diloco.run.record import current_url
from diloco.run.sections import keep_bytes
from diloco.units import byte_size
from executors.platforms import FAR
from executors.platforms.places import Place
from inner.models.naming import ASK_S
from inner.printable import first_line
from inner.settings.inner import lr_factor
from inner.settings.task import reward_model_parts
from rendezvous.agreement.membership import Wanted, read_control
from rendezvous.errors import RendezvousError, StoreFull, StoreGone, StoreRefused
from rendezvous.stores.open import open_store

T = TypeVar("T")
LOOK_S = 4.0
SOMEWHERE = "s3://BUCKET/RUN"  # an example URL, if you named no run


@dataclass(frozen=True)
class Bucket:
    """The contents of a run's bucket.   url: the run's present URL.   note: why its contents are unknown.

    unreached: the URL if the bucket did not answer, or refused, else "".   refused: repeating would not help.
    """

    url: str = ""
    wanted: Wanted = field(default_factory=Wanted)
    note: str = ""
    unreached: str = ""
    refused: bool = False


def look_into_bucket(url: str) -> Bucket:
    """Read the bucket, for LOOK_S at most, because a client without keys or network waits much longer.

    url: the run's URL, or "".
    """
    if not url:
        return Bucket(note="no --run was given, so an existing run, if there is one, is unknown")
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(lambda: _read_bucket(current_url(url))).result(LOOK_S)
    except Late:
        return Bucket(url, note=f"not checked: {url} did not answer within {LOOK_S:.0f} s", unreached=url)
    except RendezvousError as error:
        refused = isinstance(error, StoreRefused) and not isinstance(error, StoreFull | StoreGone)
        return Bucket(url, note=f"not checked: {first_line(error)}", unreached=url, refused=refused)
    finally:
        pool.shutdown(wait=False)


def _read_bucket(url: str) -> Bucket:
    return Bucket(url, read_control(open_store(url)))


def size_lines(config: RunConfig, replicas: int, steps: int, devices: int = 1) -> list[str]:
    """Return lines on memory, bytes and seconds.   devices: number of devices per replica."""
    if (sizes := _within(ASK_S, lambda: _sizes_of(config))) is None:
        return [f"memory, bytes and seconds are not known: {config.inner.model}'s parameter count could not be read"]
    found = footprint(config, replicas=replicas, steps=steps, devices=devices, **sizes)
    return [*lines(found, steps, keep_bytes(config.fleet.keep)), *_reward_model_lines(config)]


def device_bytes(config: RunConfig, devices: int) -> int | None:
    """Return the bytes that a replica needs on each of its devices; None if the model's size could not be read."""
    if (sizes := _within(ASK_S, lambda: _sizes_of(config))) is None:
        return None
    return footprint(config, replicas=1, steps=1, devices=devices, **sizes).device


def _sizes_of(config: RunConfig) -> dict[str, Any]:
    from diloco.run.sizing import sizes_of

    return sizes_of(config)


def rate_line(config: RunConfig, replicas: int) -> str:
    """Return a line with the learning rate of a run with this number of replicas."""
    inner = config.inner
    factor = lr_factor(inner, 0, replicas) / lr_factor(inner, 0, 1)
    if factor == 1:
        many = f", as for one machine, for {replicas} replicas" if replicas > 1 else ""
        return f"learning rate {inner.learning_rate:g}{many}"
    root = "√" if abs(factor - replicas) > 1e-6 else ""
    return (
        f"learning rate {inner.learning_rate * factor:.3g}: inner.lr = {inner.learning_rate:g} is for one machine, "
        f"× {root}{replicas} for {replicas} replicas (inner.schedule.lr_replicas)"
    )


def _reward_model_lines(config: RunConfig) -> list[str]:
    """Return a line for each reward model, with its additional device memory."""
    from diloco.run.sizing import stored_bytes

    found: list[str] = []
    for spelling in config.inner.rewards.models.values():
        name, revision = reward_model_parts(spelling)
        size = _within(ASK_S, lambda name=name, revision=revision: stored_bytes(name, revision or None))
        said = "its size could not be read; it lies" if size is None else f"{byte_size(size)} more"
        found.append(f"reward model {name}: {said} on the device of every replica, beside what its passes need")
    return found


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return the answer of `ask`; None if it takes longer than `seconds`, or fails."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(ask).result(seconds)
    except (Late, ConfigError):
        return None
    finally:
        pool.shutdown(wait=False)


def stand_in_url(url: str, places: Sequence[Place]) -> str:
    """Return the run's URL, or an example URL in place of ""."""
    return url or (SOMEWHERE if any(p.executor in FAR for p in places) else "runs/RUN")
