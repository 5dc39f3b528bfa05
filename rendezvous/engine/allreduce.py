"""The mean of a tensor over a fixed number of ranks that communicate only through a bucket.

    k-th call of rank i ──▶ offer for step k ──▶ all `world_size` offers there? ──▶ commit ──▶ (x₀ + x₁ + …) / n

The all-reduce uses the agreement of a run's outer steps (rendezvous.py) with strict rules: every step needs all ranks,
all weights are equal, and no late value counts.  A rank that dies can be started again.  The values that it has written
count, and it continues with the first step that it has not written (`step`).

Sums are in fp32 for every dtype, and values are added in rank order, so all ranks get the same bits.
Not promised: speed (an object store answers in milliseconds); progress with fewer ranks.
"""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from rendezvous import layout
from rendezvous.agreement.chain import first_open_step
from rendezvous.agreement.membership import Wanted
from rendezvous.agreement.rules import Rules, Timing
from rendezvous.background import together_on
from rendezvous.clock import Clock, SystemClock
from rendezvous.engine.rendezvous import Rendezvous
from rendezvous.errors import GaveUp
from rendezvous.records.records import Commit
from rendezvous.snapshots.record import Arrays
from rendezvous.store import Store
from rendezvous.stores.open import open_store
from rendezvous.stores.run_key import run_key, under_key

Floats = NDArray[np.floating[Any]]
STRICT = Rules(sync_every=1, max_carry=0, snapshot_every=1 << 60, weighting="uniform", announce=False)
NEAR_POLL_S = 0.005
FAR_POLL_S = 0.02


class NoState:
    """A state without θ: every step starts from the same empty state."""

    def size(self, fragment: int) -> int:
        return 0

    def apply(self, fragment: int, mean: np.ndarray) -> None:
        return

    def arrays(self, fragment: int) -> dict[str, np.ndarray]:
        return {}

    def load(self, arrays: Arrays) -> None:
        return


class ObjectStoreAllReduce:
    """One rank of an all-reduce through the bucket at `url`.   timeout_s: seconds that a call waits for other ranks."""

    def __init__(
        self,
        url: str,
        rank: int,
        world_size: int,
        timeout_s: float = 1800.0,
        *,
        store: Store | None = None,
        clock: Clock | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank} is not one of the {world_size} ranks 0 … {world_size - 1}")
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self._url, self._store, self._clock = url, store, clock or SystemClock()
        self._rv: Rendezvous | None = None
        self._caught_up = False

    @property
    def step(self) -> int:
        """Step number of the next call.

        If an earlier process of this rank has left a step open, wait for it; raise TimeoutError after `timeout_s`.
        """
        if self.world_size == 1:
            return 0
        try:
            return self._caught_up_rendezvous().step
        except GaveUp as error:
            raise TimeoutError(self._who_is_missing(error)) from error

    def allreduce(self, tensor: Any) -> Any:
        """Replace a float tensor (numpy or torch) by its mean over all ranks, and return it.

        Raise TimeoutError if a rank is missing.  The tensor is then unchanged; repeat the call to wait again, with the
        value of the first call.  An error while the mean is read may leave any values in the tensor; repeat the call to
        read the mean.
        """
        if self.world_size == 1:
            return tensor
        flat = as_flat_fp32(tensor)
        try:
            rv = self._caught_up_rendezvous()
            rv.offer(flat, 1)
            commit = rv.settle()
        except GaveUp as error:
            raise TimeoutError(self._who_is_missing(error)) from error
        self._check_sizes(commit, flat)
        rv.mean(commit, flat)
        rv.advance(commit)
        if not shares_memory(tensor, flat):
            write_back(tensor, flat)
        return tensor

    def _caught_up_rendezvous(self) -> Rendezvous:
        """Return this rank's Rendezvous, at the first step that no process of this rank has offered."""
        if self._rv is None:
            store = under_key(self._store or open_store(self._url), self._clock, run_key())
            poll = NEAR_POLL_S if getattr(store, "near", False) else FAR_POLL_S
            timing = Timing(poll=poll, give_up=self.timeout_s, store_patience=self.timeout_s)
            slot = layout.slot_name(self.rank)
            rv = Rendezvous(store, self._clock, slot, STRICT, timing, together=together_on(store))
            rv.claim()
            n = self.world_size
            rv.members.wanted = Wanted(replicas=n, universe=n, min_replicas=n)
            rv.resume_at(NoState(), first_open_step(rv.store))
            self._rv = rv
        while not self._caught_up and self._rv.offers.has_offered(self._rv.slot):
            self._rv.advance(self._rv.settle())
        self._caught_up = True
        return self._rv

    def _who_is_missing(self, error: GaveUp) -> str:
        rv = self._rv
        ranks = [i for i in range(self.world_size) if rv and not rv.offers.has_offered(layout.slot_name(i))]
        if rv is None or not ranks:  # no rank is missing: the store did not answer, or the step was not decided in time
            return f"within {self.timeout_s:.0f} s: {error}"
        return (
            f"step {rv.step}: no value from rank {', '.join(map(str, ranks))} of {self.world_size} within "
            f"{self.timeout_s:.0f} s. Offered values stay valid: start those ranks again, or repeat the call to wait"
        )

    def _check_sizes(self, commit: Commit, mine: np.ndarray) -> None:
        sizes = {o.slot: o.size // 4 for o in commit.offers}
        if set(sizes.values()) != {mine.size}:
            raise ValueError(
                f"step {commit.t}: the ranks' tensors differ in size: {sizes}. Nothing was averaged. Give each rank a "
                "tensor of the same size"
            )


def as_flat_fp32(tensor: Any) -> np.ndarray:
    """Return a float array or torch tensor as flat fp32, without a copy if it is flat fp32 memory already."""
    if isinstance(tensor, np.ndarray):
        array = cast(Floats, tensor)
        if array.dtype.kind == "f":
            fits = array.flags.c_contiguous and array.flags.aligned and array.flags.writeable
            return array.astype(np.float32, order="C", copy=not fits).reshape(-1)
    else:
        import torch

        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point():
            return tensor.detach().to("cpu", torch.float32).contiguous().reshape(-1).numpy()
    dtype: object = getattr(cast(object, tensor), "dtype", type(cast(object, tensor)))
    raise TypeError(f"allreduce takes numpy arrays and torch tensors of floats, got {dtype}")


def shares_memory(tensor: Any, flat: np.ndarray) -> bool:
    """Whether `flat` is the tensor's own memory."""
    if isinstance(tensor, np.ndarray):
        return np.may_share_memory(cast(Floats, tensor), flat)
    return tensor.device.type == "cpu" and tensor.data_ptr() == flat.ctypes.data


def write_back(tensor: Any, mean: np.ndarray) -> None:
    """Write the mean into the tensor, in the tensor's dtype and shape, on its device."""
    if isinstance(tensor, np.ndarray):
        array = cast(Floats, tensor)
        array[...] = mean.reshape(array.shape)
        return
    import torch

    with torch.no_grad():
        tensor.copy_(torch.from_numpy(mean).view(tensor.shape))  # pyright: ignore[reportUnknownMemberType]
