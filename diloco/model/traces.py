"""Export rollouts from a run's log as states, for questions to stronger models.

    log/{slot}-{generation}/{n}.rollouts.jsonl       line 1: outer step, tools; then one rollout a line
        ──▶ state_id = {slot}-{generation}/{outer step}/{n}.{rollout}:{turn}
        ──▶ TraceState: messages so far, action, reward of the rollout, error of the action, how unsure the group was

    rollouts/{slot}/{g}/{bundle}.{attempt}.bundle    with fleet.record_rollouts: all rollouts, instead of the log's,
                                                     without those of actors that a replica doubted (replica/door.py)
        ──▶ state_id = {slot}/{g}/{outer step}/{bundle}.{attempt}.{rollout}:{turn}
        ──▶ and late_rewards, the rewards that came afterwards (late_rewards.py), by their names

    diloco traces RUN --to traces.jsonl ─▶ replay_trace ─▶ pairs.jsonl ─▶ inner.replay.pairs          docs/replay.md

This file does not import torch.

Not promised: every rollout of a run that does not record them. Such a run logs a fair sample (`fleet.log_rollouts` per
replica and outer step), and a `kill -9` loses the replica's rollouts since its last outer step.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from diloco.model.late_rewards import bundle_attempt, checked_bundle, late_rewards, leave_out, read_listed
from diloco.process.journal import rollout_head, rollout_line
from diloco.run.config import ConfigError
from inner import TraceState, TraceWarning, save_states
from inner.masking import secrets_here
from inner.printable import printable
from inner.rollouts.rollout_states import bundle_rollouts, bundle_tokens, rollout_states
from inner.rollouts.sample import SampledRollout
from rendezvous import layout
from rendezvous.records.judgements import MOST_DOUBTS, LateReward, RolloutVerdict
from rendezvous.records.records import WireError, decode_or_none
from rendezvous.records.rollouts import Rollouts
from rendezvous.store import Store

ODD = (ValueError, KeyError, TypeError, AttributeError, RecursionError)  # what messages of another shape raise


def run_states(store: Store, run: str = "", *, sampled: bool = False) -> Iterator[TraceState]:
    """Yield the states of all rollouts that the run has kept, by replica and time.

    run: nonce of run.json.   sampled: only the log's sample, in which each replica has masked its secrets."""
    logged = _state_keys(store)
    listed = [] if sampled else store.list(layout.ROLLOUTS)
    if bundles := _bundles(listed):
        tools, late, doubted = _tools_in(store, logged), late_rewards(store, listed, run), _doubted(store, listed)
        for key in bundles:
            yield from _bundle_states(store, key, run, tools, late.get(key, []), doubted)
        return
    for key in logged:
        yield from _read_states(store, key)


def freeze(store: Store, to: Path, run: str = "", *, sampled: bool = False) -> dict[str, int]:
    """Write the states to `to` and return counts.   sampled: as above.   Raises ConfigError if there is no state."""
    if not _state_keys(store) and (sampled or not _bundles(store.list(layout.ROLLOUTS))):
        raise ConfigError(
            'this run has logged no rollouts: it learns from text (loop = "supervised"), has fleet.log_rollouts = 0, '
            "or took no outer step yet. Set fleet.log_rollouts to 4 or so, or wait for its first outer step"
        )
    rollouts, counts = set[str](), Counter[str]()

    def counted() -> Iterator[TraceState]:
        for state in run_states(store, run, sampled=sampled):
            rollouts.add(state["state_id"].rpartition(":")[0])
            counts.update(states=1, errors=bool(state.get("error")))
            yield state

    to.parent.mkdir(parents=True, exist_ok=True)
    save_states(counted(), to)
    return {"states": counts["states"], "rollouts": len(rollouts), "errors": counts["errors"]}


def _state_keys(store: Store) -> list[str]:
    return sorted(key for key in store.list(layout.LOGS) if layout.is_rollouts(key) and layout.log_owner(key))


def _read_states(store: Store, key: str) -> Iterator[TraceState]:
    slot, generation = layout.log_owner(key) or ("", 0)
    n = int(Path(key).name.partition(".")[0])
    try:
        lines = read_listed(store, key).decode(errors="replace").splitlines()
    except ValueError as error:
        return leave_out(key, error)
    step, tools = -1, dict[str, Any]()
    for i, line in enumerate(lines):
        try:
            if i == 0:
                step, tools = rollout_head(line)
            elif step >= 0:
                rollout = cast("SampledRollout", rollout_line(line))
                yield from rollout_states(rollout, f"{slot}-{generation}/{step}/{n}.{i - 1}", tools)
        except ODD as error:
            warnings.warn(f"{key}, line {i + 1}: {error}. It is left out.", TraceWarning, stacklevel=2)


def _bundles(listed: list[str]) -> list[str]:
    return sorted(key for key in listed if key.endswith(".bundle"))


def _doubted(store: Store, listed: list[str]) -> dict[tuple[str, str], list[str]]:
    """Return (slot, actor) -> the keys of the bundles that have a verdict with doubts."""
    found = defaultdict[tuple[str, str], list[str]](list)
    for key in (key for key in listed if key.endswith(".verdict")):
        with suppress(ValueError):
            verdict = decode_or_none(RolloutVerdict, read_listed(store, key))
            if verdict is not None and verdict.doubts:
                found[key.split("/")[1], verdict.actor].append(f"{key.removesuffix('verdict')}bundle")
    return found


def _does_count(record: Rollouts, key: str, doubted: Mapping[tuple[str, str], list[str]]) -> bool:
    """Whether a replica might train on this bundle.   If not, warn, with the same words for all bundles of an actor."""
    doubts = doubted.get((record.slot, record.actor), [])
    if key not in doubts and sum(at < key for at in doubts) < MOST_DOUBTS:
        return True
    text = f"{record.slot} doubted rollouts of the actor {printable(record.actor)} (their verdicts have the reasons)"
    warnings.warn(f"{text}. Those that it refused are left out.", TraceWarning, stacklevel=2)
    return False


def _tools_in(store: Store, logged: list[str]) -> dict[str, Any]:
    """Return the tools' schemas of the run, as the first sample in its log has them; {} without one."""
    for key in logged[:1]:
        with suppress(ValueError, KeyError, TypeError, IndexError):
            lines = read_listed(store, key).decode(errors="replace").splitlines()
            return rollout_head(lines[0])[1]
    return {}


def _bundle_states(
    store: Store, key: str, run: str, tools: dict[str, Any], late: list[LateReward],
    doubted: Mapping[tuple[str, str], list[str]],
) -> list[TraceState]:  # fmt: skip
    found = list[TraceState]()
    try:
        record, payload = checked_bundle(store, key, run)
        if not _does_count(record, key, doubted):
            return []
        rollouts = bundle_rollouts(bytes(payload), secrets_here())
        counts = len(rollouts), bundle_tokens(bytes(payload))
        if counts != (record.rollouts, record.tokens):
            raise ValueError(
                f"it has {counts[0]} rollouts, {counts[1]} tokens; its record says {record.rollouts} of {record.tokens}"
            )
        (generation, bundle), attempt = record.place, bundle_attempt(key, record)
        for i, rollout in enumerate(rollouts):
            name = f"{record.slot}/{generation}/{record.step}/{bundle}.{attempt}.{i}"
            given = {one.name: one.value for one in late if one.rollout == i}
            for state in rollout_states(rollout, name, tools):
                found.append({**state, "late_rewards": given} if given else state)
        return found
    except (WireError, *ODD) as error:
        leave_out(key, error)
        return []
