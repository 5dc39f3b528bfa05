"""Rewards that come after their rollouts: a person's mark, a test that ran overnight, a customer's answer.

    r00/42/7/0.0.3 = {slot}/{g}/{outer step}/{bundle}.{attempt}.{rollout}      as in `diloco traces`, without the turn
        │
        ▼ rollouts/r00/0000000042/0000.0.bundle            is it of this run, and whole? has it a rollout 3?
          rollouts/r00/0000000042/0000.0.0003.human.reward ◀── put_once: the first reward of a name counts

No replica, actor or audit reads these records, so trained steps and the results of `verify --inner` stay the same.  The
record has both the late reward and the reward for training.  Readers: `diloco traces` (and its pairs), `report`.

Not promised: that a judge is the person whose name it uses; that the bundle outlives its step (`fleet.keep`).
"""

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

from diloco.run.config import ConfigError
from diloco.run.record import Run
from inner import TraceWarning, load_states, reward_pairs, save_pairs
from inner.printable import printable
from inner.rollouts.rollout_states import bundle_rollouts
from rendezvous import layout
from rendezvous.clock import Clock
from rendezvous.errors import BadKey, StoreRefused
from rendezvous.records.digests import required_digest_kind
from rendezvous.records.judgements import LateReward
from rendezvous.records.records import WireError, new_nonce
from rendezvous.records.rollouts import Rollouts, is_whole, read_record
from rendezvous.store import PatientStore, Store, put_once

PATIENCE_S = 20.0
MOST = 1e18  # the largest magnitude of a reward, also in training
LONGEST_NAME = 64
_ROLLOUT = re.compile(r"(r[0-9]{2,5})/([0-9]{1,10})/([0-9]{1,10})/([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})(:[0-9]+)?")


def give_reward(run: Run, clock: Clock, rollout: str, value: float, name: str) -> LateReward:
    """Record a reward of a recorded rollout.   Return the record that counts for this name.

    rollout: the state_id of `diloco traces`, with or without its turn.   name: the judge's name.
    Raise ConfigError if the rollout is missing, the value is not finite, or `name` gave another value before.
    """
    _check(value, name)
    bundle, step, index = _place(rollout)
    store = PatientStore(run.store, clock, PATIENCE_S, waits_on_refusal=False)
    record, recorded = _recorded_reward(run, store.get(bundle), bundle, step, index)
    made = LateReward(
        of=record.nonce, rollout=index, name=name, value=float(value), recorded=recorded, at=clock.wall(),
        nonce=new_nonce(),
    )  # fmt: skip
    stands = LateReward.decode(put_once(store, clock, made.key(bundle), made.encode())[1])
    if stands.value != made.value:
        raise ConfigError(
            f"{name} has already given {stands.value:g} to {rollout}. The first reward of a name is final. Use another "
            f"name: --name {name}_2"
        )
    return stands


def _check(value: float, name: str) -> None:
    if not math.isfinite(value) or abs(value) > MOST:
        raise ConfigError(f"the reward is {value}. Give a number from -1e18 to 1e18")
    if not layout.is_word(name) or len(name) > LONGEST_NAME:
        raise ConfigError(f"the name is {name!r:.100}. Give at most {LONGEST_NAME} letters, digits and _")


def _place(rollout: str) -> tuple[str, int, int]:
    """Return a rollout's bundle (its key), outer step and number."""
    found = _ROLLOUT.fullmatch(rollout)
    if found is None:
        raise ConfigError(
            f"{rollout!r:.100} is not a recorded rollout, such as r00/42/7/0.0.3. `diloco traces RUN --to FILE` writes "
            "the names as state_id. Without fleet.record_rollouts, a run's rollouts cannot get late rewards"
        )
    generation, step, bundle, attempt, index = map(int, found.groups()[1:6])
    return layout.bundle_key(found[1], generation, bundle, attempt), step, index


def _recorded_reward(run: Run, body: bytes | None, key: str, step: int, index: int) -> tuple[Rollouts, float | None]:
    """Return the bundle's record, and the reward that it has for a rollout."""
    if body is None:
        raise ConfigError(
            f"{run.url} has no {key}. It records no rollouts (fleet.record_rollouts), or deleted them with their step "
            "(fleet.keep)"
        )
    try:
        record, payload = read_record(body)
        bundle_attempt(key, record)
        rollouts = bundle_rollouts(bytes(payload))
        whole = is_whole(record, payload, required_digest_kind(run.store))
    except (WireError, ValueError) as error:
        raise ConfigError(f"{key} cannot be used: {error}. Name another rollout") from error
    if not whole or record.run != run.record.nonce:
        raise ConfigError(f"{key} is damaged, or of another run: nothing was written. Name another rollout")
    if record.step != step or index >= len(rollouts):
        there = f"{len(rollouts)} of outer step {record.step}, numbered from 0"
        raise ConfigError(f"{key} has no rollout {index} of outer step {step}, only {there}. Correct --rollout")
    reward = rollouts[index]["reward"]
    return record, None if reward is None or abs(reward) > MOST else reward


def bundle_attempt(key: str, record: Rollouts) -> int:
    """Return the attempt of a bundle's key.   Raise ValueError if its record is of another place."""
    attempt = int(key.removesuffix(".bundle").rpartition(".")[2])
    if layout.bundle_key(record.slot, *record.place, attempt) != key:
        raise ValueError(f"it is of {record.slot}, generation {record.place[0]}, bundle {record.place[1]}")
    return attempt


def read_listed(store: Store, key: str) -> bytes:
    """Return the object under a key of a LIST, b"" if it is gone.

    Raise ValueError for a name or a kind of file (a link, a FIFO) that no replica makes."""
    try:
        return store.get(key) or b""
    except BadKey:
        raise ValueError("no replica writes under this name") from None
    except StoreRefused as error:
        if not getattr(store, "near", False):
            raise  # a bucket that refuses to be read refuses everything
        raise ValueError(str(error)) from error


def leave_out(key: str, error: Exception) -> None:
    """Warn that an object is not used."""
    warnings.warn(f"{printable(key)}: {printable(str(error))}. It is left out.", TraceWarning, stacklevel=3)


def checked_bundle(store: Store, key: str, run: str = "") -> tuple[Rollouts, memoryview]:
    """Return a bundle's record and payload.   run: nonce of run.json, "" for any run.

    Raise WireError or ValueError unless the bundle is whole, in its place and of this run."""
    record, payload = read_record(read_listed(store, key))
    bundle_attempt(key, record)
    if not is_whole(record, payload, required_digest_kind(store)):
        raise ValueError("its bytes have another digest than its record names")
    if run and record.run != run:
        raise ValueError(f"it is of another run, {record.run}")
    return record, payload


def late_rewards(store: Store, listed: Iterable[str], run: str = "") -> dict[str, list[LateReward]]:
    """Return a bundle's key -> its late rewards, from the keys of rollouts/; warn about invalid records."""
    found = defaultdict[str, list[LateReward]](list)
    bundles = dict[str, Rollouts | Exception]()
    for key in listed:
        if not key.endswith(".reward"):
            continue
        bundle = ".".join([*key.split(".")[:2], "bundle"])
        try:
            record = LateReward.decode(read_listed(store, key))
            if record.key(bundle) != key:
                raise WireError(f"it is of rollout {record.rollout} by {record.name}")
            if bundle not in bundles:
                bundles[bundle] = _bundle_or_error(store, bundle, run)
            _refuse_stranger(record, bundles[bundle])
            found[bundle].append(record)
        except (WireError, ValueError) as error:
            leave_out(key, error)
    return found


def _bundle_or_error(store: Store, key: str, run: str) -> Rollouts | Exception:
    try:
        return checked_bundle(store, key, run)[0]
    except (WireError, ValueError) as error:
        return error


def _refuse_stranger(reward: LateReward, bundle: Rollouts | Exception) -> None:
    """Raise ValueError unless the reward is of a rollout of the bundle beside it."""
    if isinstance(bundle, Exception):
        raise ValueError(f"its bundle cannot be used: {bundle}")
    if reward.of != bundle.nonce:
        raise ValueError(f"it is of a bundle {reward.of}, and {bundle.nonce} is beside it")
    if reward.rollout >= bundle.rollouts:
        raise ValueError(f"its bundle has {bundle.rollouts} rollouts, numbered from 0")


def count_late_rewards(store: Store, run: str = "") -> dict[str, dict[str, Any]]:
    """Return name -> number of rollouts, mean late reward, mean of the rewards that were trained on."""
    records = [one for some in late_rewards(store, store.list(layout.ROLLOUTS), run).values() for one in some]
    names = sorted({one.name for one in records})
    return {name: _counted([one for one in records if one.name == name]) for name in names}


def write_pairs(states: str | Path, to: str | Path, name: str | None) -> int:
    """Make pairs from a file of states by late rewards, and write them.   name: the judge; None: the only judge.

    Return the number of pairs.   Raise ConfigError if there is no pair, or if `name` is None with several judges.
    """
    found = load_states(states)
    names = sorted({one for state in found for one in state.get("late_rewards", {})})
    if not names:
        raise ConfigError("no rollout of this run has a late reward, so there is no pair. Give some with diloco reward")
    if (name is None and len(names) > 1) or (name is not None and name not in names):
        raise ConfigError(f"late rewards were given by {', '.join(names)}. Choose one with --by")
    pairs = reward_pairs(found, name or names[0])
    if not pairs:
        raise ConfigError(
            "no two actions in one state have different late rewards, so there is no pair. Give rewards to more "
            "rollouts of one prompt: diloco reward"
        )
    save_pairs(pairs, to)
    return len(pairs)


def _counted(records: list[LateReward]) -> dict[str, Any]:
    trained = [one.recorded for one in records if one.recorded is not None]
    mean = fmean(one.value for one in records)
    return {"rollouts": len(records), "mean": mean, "trained_on": fmean(trained) if trained else None}
