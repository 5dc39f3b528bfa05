"""A StoreManager without `make_diloco`, for a plain torchft class.

    allreduce × n ─▶ one blob ─▶ offer ─▶ (first wait) settle, mean ─▶ the n tensors
    should_commit  ─▶ if allreduce was not called: an empty offer, so that the round is decided like any other
    report_error   ─▶ should_commit returns False, and the next round reads the same step's mean again
    first hook after a commit ─▶ the registered states are complete, and become snapshot t
    first hook of a session ─▶ heal: load the newest published state

The rendezvous cannot step θ here (θ is inside torchft and your optimizer). So a session that heals from an older
state repeats the rounds since then. Each repeated round ends with the mean that was committed for it.

Not promised: a check that replicas started from equal θ (only a flat θ has a digest); that old objects are deleted:
`keep` has no effect here, and each step leaves its deltas, its mean and its states in the bucket.
"""

import io
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diloco.process.session import Session
from rendezvous.agreement.rules import Rules
from rendezvous.records.records import Commit
from rendezvous.records.state import UNVERIFIED
from rendezvous.snapshots import record as snapshots

START_PATIENCE_S = 1.0  # step 0 does not wait for slow loops: a slow loop joins later
RULES = Rules(
    snapshot_every=1 << 40, max_carry=0, weighting="uniform"
)  # this class writes the snapshots; it does not know which fragment a blob has


class OpaqueState:
    """A state whose content the rendezvous does not know."""

    def size(self, fragment: int) -> int:
        return 0

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        raise AssertionError("a bare manager replays rounds through torchft, never by itself")

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        return {}

    def load(self, arrays: snapshots.Arrays) -> None:
        raise AssertionError("a bare manager loads through the registered functions")


class BareRounds:
    """The rounds and the healing of a bare manager."""

    def __init__(self, session: Session, load: Callable[[Any], None] | None, save: Callable[[], Any] | None) -> None:
        self._session = session
        self._joined = False
        self._fns: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        if load is not None and save is not None:
            self._fns["default"] = (load, save)
        self._tensors: list[Tensor] = []
        self._commit: Commit | None = None  # torchft applies its mean after should_commit
        self._published = -1
        self.error: Exception | None = None  # reported by the caller in this round

    @property
    def step(self) -> int:
        return self._session.rv.step

    def register_state(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        if key in self._fns and key != "default":
            raise ValueError(
                f"this manager has the state functions for {key!r} of another training. Make a new manager for each "
                "`with make_diloco(…)`, also after an error"
            )
        self._fns[key] = (load, save)

    def read_states(self) -> dict[str, Any]:
        return {key: save() for key, (_, save) in self._fns.items()}

    # ---------------------------------------------------------------- rounds

    def add_tensor(self, tensor: Tensor) -> Callable[[], None]:
        """Add a tensor to this round. Return the function that its Work calls.  After an error, no tensor is added."""
        if self.error is None:
            self._tensors.append(tensor)
        return self.reduce_round

    def reduce_round(self) -> None:
        """Send all collected tensors as one blob and write the mean into them, once per round."""
        if self._commit is not None or not self._tensors or self.error is not None:
            return
        flat = torch.cat([t.detach().reshape(-1).float().cpu() for t in self._tensors])
        mean = self._average_round(flat.numpy())
        at = 0
        for tensor in self._tensors:
            part = torch.from_numpy(mean[at : at + tensor.numel()])
            tensor.detach().copy_(part.view(tensor.shape))
            at += tensor.numel()

    def close_round(self) -> bool:
        """Answer should_commit: True if the step is committed; False after an error.

        After an error the step stays open here, even if the other replicas commit it.  The next round reads this
        replica's offer (if it was durable before the error) and the commit. The next round ends with the mean that all
        other replicas applied, read from the bucket.  The next round's own work is lost.
        """
        self.join()
        if self.error is not None:
            self._tensors = []
            self._commit = None
            self.error = None
            return False
        self.reduce_round()
        if self._commit is None:
            self._average_round(np.zeros(0, np.float32))
        assert self._commit is not None
        self._tensors = []
        commit = self._commit
        self._commit = None
        self._session.rv.advance(commit)
        return True

    def _average_round(self, delta: np.ndarray) -> np.ndarray:
        self._session.rv.offer(delta, 1)
        self._commit = self._session.rv.settle()
        if all(o.size != delta.nbytes for o in self._commit.offers):
            return delta  # our offer was late and the other offers were empty: nothing to average
        self._session.rv.mean(self._commit, delta)
        return delta

    # ---------------------------------------------------------------- healing

    def join(self) -> None:
        """Load the newest published state, or publish ours as the first state. Later calls do nothing."""
        if self._joined:
            return
        self._joined = True
        timing = self._session.rv.timing
        patience = min(timing.start_patience, START_PATIENCE_S)
        rv = self._session.rv.set_rules(RULES, replace(timing, start_patience=patience))
        rv.resume_at(OpaqueState(), 0)
        for snapshot in snapshots.newest_first(rv.store):
            arrays = snapshots.load(rv.store, snapshot, rv.emit, {})
            if arrays is not None and "states" in arrays:
                self._load_states(arrays)
                rv.resume_at(OpaqueState(), snapshot.t)
                self._published = rv.members.status.step = snapshot.t
                return
        self.publish_states()

    def publish_states(self) -> None:
        """Write the registered states as snapshot `step`, unless it exists."""
        if self._published >= self._session.rv.step or not self._fns:
            return
        self._published = self._session.rv.step
        stands = next(snapshots.newest_first(self._session.rv.store, self._session.rv.step), None)
        if stands is None or stands.t < self._session.rv.step:
            rv = self._session.rv
            prev = rv.chain.commit_digest(rv.step - 1)
            torch.save(self.read_states(), body := io.BytesIO())
            states = {"states": np.frombuffer(body.getbuffer(), np.uint8)}
            snapshots.write(rv.store, rv.clock, rv.step, states, base=UNVERIFIED, prev=prev)

    def _load_states(self, arrays: snapshots.Arrays) -> None:
        states = torch.load(io.BytesIO(arrays["states"].data), weights_only=True)
        for key, (load, _) in self._fns.items():
            if key in states:
                load(states[key])
