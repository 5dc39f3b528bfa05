"""Export rollouts from a run's log as states, about which stronger models can be asked.

    log/{slot}-{generation}/{n}.rollouts.jsonl       line 1: outer step, tools; then one rollout a line
        ──▶ state_id = {slot}-{generation}/{outer step}/{n}.{rollout}:{turn}
        ──▶ TraceState: messages so far, action, reward of the rollout, error of the action, how unsure the group was

    diloco traces RUN --to traces.jsonl ─▶ replay_trace ─▶ pairs.jsonl ─▶ inner.replay.pairs          docs/replay.md

This file does not import torch.

Not promised: every rollout. A run logs a fair sample (`fleet.log_rollouts` per replica and outer step). A `kill -9`
loses the replica's rollouts since its last outer step.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from diloco.process.journal import rollout_head, rollout_line
from diloco.run.config import ConfigError
from inner import TraceState, TraceWarning, save_states
from inner.rollouts.rollout_states import rollout_states
from inner.rollouts.sample import SampledRollout
from rendezvous import layout
from rendezvous.store import Store


def run_states(store: Store) -> list[TraceState]:
    """Return the states of all rollouts in a run's log, by replica and time."""
    return [state for key in _state_keys(store) for state in _read_states(store, key)]


def freeze(store: Store, to: Path) -> dict[str, int]:
    """Write the states to `to` and return counts.   Raises ConfigError if there are none."""
    if not _state_keys(store):
        raise ConfigError(
            "this run has logged no rollouts: it is supervised, has fleet.log_rollouts = 0, or took no outer "
            "step yet. Set fleet.log_rollouts to 4 or so, or wait for its first outer step"
        )
    states = run_states(store)
    to.parent.mkdir(parents=True, exist_ok=True)
    save_states(states, to)
    rollouts = len({state["state_id"].rpartition(":")[0] for state in states})
    return {"states": len(states), "rollouts": rollouts, "errors": sum(bool(state.get("error")) for state in states)}


def _state_keys(store: Store) -> list[str]:
    return sorted(key for key in store.list(layout.LOGS) if layout.is_rollouts(key))


def _read_states(store: Store, key: str) -> Iterator[TraceState]:
    owner = layout.log_owner(key)
    if owner is None:
        return  # not written by a replica
    slot, generation = owner
    n = int(Path(key).name.partition(".")[0])
    lines = (store.get(key) or b"").decode(errors="replace").splitlines()
    step, tools = -1, dict[str, Any]()
    for i, line in enumerate(lines):
        try:
            if i == 0:
                step, tools = rollout_head(line)
            elif step >= 0:
                rollout = cast("SampledRollout", rollout_line(line))
                yield from rollout_states(rollout, f"{slot}-{generation}/{step}/{n}.{i - 1}", tools)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            warnings.warn(f"{key}, line {i + 1}: {error!r}. It is left out.", TraceWarning, stacklevel=2)
