"""Reader of the weights of each outer step, from the bucket alone, for an inference engine that generates rollouts.

    weights/{t} ──▶ is my θ its parent?       yes ─▶ write the changed values over mine ─▶ the digest is right ─▶ t
                              │ no: not applied                                                      │ no
                              └──▶ the newest anchor, and the changes after it ◀─────────────────────┘

    for weights in follow_weights("s3://bucket/run"):
        weights.load_into(model)                                              # transformers, peft: any nn.Module
        engine.load_weights(weights.named_tensors(changed_only=True))         # vLLM's model (docs/weights.md)

The reader writes nothing.  If the next commit shows that the writer of some weights had another θ, the reader drops
these weights and all that depend on them.

Not promised: the weights of every step.  The reader gets the newest available weights, and skips older ones.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from rendezvous import layout
from rendezvous.background import Emit, no_emit
from rendezvous.clock import Clock, SystemClock
from rendezvous.errors import Corrupt, WrongRun
from rendezvous.records.digests import has_digest, required_digest_kind
from rendezvous.records.records import Commit, Weights, WeightsPart, decode_or_none
from rendezvous.store import PatientStore, Store
from rendezvous.stores.run_key import open_signed
from rendezvous.weights.patch import decode, digest_of_bits
from rendezvous.weights.writer import ANCHOR_EVERY, read_weights

if TYPE_CHECKING:
    import torch

MOST_PER_BYTE = 4096  # limit of values per byte of an anchor: deflate packs about 1000 equal bytes into one
LATE_S = 300.0  # seconds to wait for the weights of the last commit
PATIENCE_S = 60.0  # seconds that the follower waits for an answer of the store


@dataclass(frozen=True)
class FollowedWeights:
    """θ of one outer step in bf16.

    The tensors are the follower's memory, so use them before you take the next weights.
    step: number of outer steps in θ.   parameters: name -> (index of its first value, shape).   bits: uint16 (P,).
    changed: names of the parameters that differ from the previous weights; all names in the first weights.
    bytes: number of bytes that were read for these weights.
    """

    step: int
    parameters: dict[str, tuple[int, tuple[int, ...]]]
    bits: np.ndarray
    changed: frozenset[str]
    bytes: int

    def named_tensors(self, *, changed_only: bool = False) -> "Iterator[tuple[str, torch.Tensor]]":
        """Yield (name, bf16 tensor in its shape), in the model's order."""
        import torch

        flat = torch.from_numpy(self.bits.view(np.int16)).view(torch.bfloat16)  # pyright: ignore[reportUnknownMemberType]
        for name, (at, shape) in self.parameters.items():
            if not changed_only or name in self.changed:
                yield name, flat[at : at + prod(shape)].view(shape)

    def load_into(self, model: "torch.nn.Module") -> None:
        """Copy the weights into the model's parameters of the same names, in their dtype and on their device.

        Raise WrongRun, and copy nothing, if the model lacks a parameter or has it in another shape.
        """
        import torch

        own = dict(model.named_parameters())
        for name, (_, shape) in self.parameters.items():
            found = tuple(own[name].shape) if name in own else "no such parameter"
            if found != shape:
                raise WrongRun(
                    f"the run's parameter {name} has shape {shape}, this model has {found}. Load the run's start "
                    "model (diloco export RUN --to DIR), with the adapter if the run trains one"
                )
        with torch.no_grad():
            for name, tensor in self.named_tensors():
                own[name].copy_(tensor)


class WeightsFollower:
    """The weights of one reader.   emit("weights_refused", step=…, text=…): called for weights that are refused."""

    def __init__(self, store: Store, emit: Emit = no_emit) -> None:
        self._store = store
        self._emit = emit
        self._bits = np.empty(0, np.uint16)
        self._has: Weights | None = None  # the manifest of the present bits
        self._confirmed = False  # whether the commit after these weights names the same θ
        self._given = -1  # step of the last weights that `poll` returned
        self._head = -1  # the newest step that the run is known to have reached
        self._refused: set[str] = set()  # nonces of refused manifests
        self._parameters: dict[str, tuple[int, tuple[int, ...]]] = {}

    def poll(self) -> FollowedWeights | None:
        """Return the newest available weights if they are newer than the last returned; else None."""
        self._look_for_head()
        self._confirm()
        for t in range(self._head, max(self._given, self._head - ANCHOR_EVERY), -1):
            weights = self._read(t)
            if weights is None or not self._is_right(weights):
                continue
            if (found := self._reach(weights)) is not None:
                self._given = t
                return found
        return None

    def weights_of(self, t: int) -> FollowedWeights | None:
        """Return the weights of outer step t; None if the bucket has none, or only wrong ones."""
        weights = self._read(t)
        return None if weights is None or not self._is_right(weights) else self._reach(weights)

    # ------------------------------------------------------------------ weights in the bucket

    def _look_for_head(self) -> None:
        """Find the newest step by GETs of commits; at the first call, begin at the newest weights that LIST shows."""
        if self._head < 0:
            listed = (layout.weights_step(key) for key in self._store.list(layout.WEIGHTS))
            self._head = max((t for t in listed if t is not None), default=0)
        while self._store.get(layout.commit_key(self._head)) is not None:
            self._head += 1

    def _read(self, t: int) -> Weights | None:
        weights = read_weights(self._store, t)
        return None if weights is None or weights.nonce in self._refused else weights

    def _confirm(self) -> None:
        """Compare the present weights with the commit after them, as soon as it exists; drop them if θ differs."""
        if self._has is not None and not self._confirmed and self._head > self._has.t:
            self._confirmed = self._is_right(self._has)
            if not self._confirmed:
                self._has = None

    def _is_right(self, weights: Weights) -> bool:
        """Whether the commit after the weights names the same θ; True while there is no such commit."""
        commit = decode_or_none(Commit, self._store.get(layout.commit_key(weights.t)))  # replicas report a bad commit
        right = commit is None or commit.base == weights.base
        if not right:
            self._refuse(weights, f"their writer had another θ than commit {weights.t} names")
        return right

    # ------------------------------------------------------------------ the way to newer weights

    def _reach(self, weights: Weights) -> FollowedWeights | None:
        """Get these weights by changes to the present weights or from an anchor; None if neither is possible."""
        for start in dict.fromkeys((self._has.digest if self._has else "", "")):
            way = self._way_from(start, weights)
            if way is not None and (touched := self._walk(way)) is not None:
                return FollowedWeights(
                    step=weights.t, parameters=self._parameters, bits=self._bits,
                    changed=frozenset(touched), bytes=sum(w.size for w in way),
                )  # fmt: skip
        return None

    def _way_from(self, start: str, weights: Weights) -> list[Weights] | None:
        """Return the manifests that lead from `start` to these weights, oldest first, or None.

        start: digest of the weights to begin with; "": begin with an anchor.
        """
        way = [weights]
        while (parent := way[-1].parent) and parent != start:
            before = self._read(way[-1].t - 1)
            if before is None or len(way) > ANCHOR_EVERY or not self._is_right(before):
                return None
            if before.digest != parent:
                self._refuse(way[-1], f"they build on {parent}, and step {before.t} has {before.digest}")
                return None
            way.append(before)
        return way[::-1]

    def _walk(self, way: list[Weights]) -> set[str] | None:
        """Apply the manifests, oldest first.   Return the names of the changed parameters; None if one is damaged."""
        touched = set[str]()
        for weights in way:
            self._has = None
            try:
                touched |= self._apply(weights)
            except Corrupt as error:
                self._refuse(weights, str(error))
                return None
            self._has, self._confirmed = weights, False
        return touched

    def _apply(self, weights: Weights) -> set[str]:
        if not weights.parent:
            self._begin(weights)
        names = list(self._parameters)
        bounds = np.array([*(at for at, _ in self._parameters.values()), len(self._bits)])
        touched = np.zeros(len(names), bool)
        for part in weights.parts:
            for changes in decode(self._fetch(part)):
                if changes.start + changes.count > len(self._bits):
                    raise Corrupt("a patch writes values after the last position")
                changes.apply(self._bits)
                touched |= changes.touch(bounds)
        found = digest_of_bits(self._bits)
        if found != weights.digest:
            raise Corrupt(f"θ_{weights.t} in bf16 has digest {found}, and {weights.digest} was announced")
        return {names[i] for i in np.flatnonzero(touched)}

    def _begin(self, anchor: Weights) -> None:
        if anchor.values > MOST_PER_BYTE * anchor.size:
            raise Corrupt(f"the anchor of step {anchor.t} claims {anchor.values} values in only {anchor.size} bytes")
        if len(self._bits) != anchor.values:
            self._bits = np.zeros(anchor.values, np.uint16)
        at = 0
        self._parameters = {}
        for name, shape, _ in anchor.layout:
            self._parameters[name] = at, tuple(shape)
            at += prod(shape)

    def _fetch(self, part: WeightsPart) -> bytearray:
        if part.size and not self._store.get_into(part.blob, memoryview(bytearray(1)), part.size - 1):
            raise Corrupt(f"{part.blob} is not there any more, or has fewer than {part.size} bytes")
        body = bytearray(part.size)
        for _ in range(3):
            if not self._store.get_into(part.blob, memoryview(body)):
                raise Corrupt(f"{part.blob} is not there any more")
            if has_digest(body, part.digest, required_digest_kind(self._store)):
                return body
        raise Corrupt(f"{part.blob} does not have the announced bytes")

    def _refuse(self, weights: Weights, why: str) -> None:
        self._refused.add(weights.nonce)
        self._emit("weights_refused", step=weights.t, text=why)


def follow_weights(
    run: "str | Store",
    *,
    until: int | None = None,
    poll_s: float = 2.0,
    clock: Clock | None = None,
    emit: Emit = no_emit,
) -> Iterator[FollowedWeights]:
    """Yield the newest weights of a run as they appear, and wait between them.

    run: a URL (a sealed run needs DILOCO_RUN_KEY), or an open store.   until: the last step; None: without end.
    The iterator also ends LATE_S after the commit of the last step: a step whose writer was killed never gets weights.
    poll_s: seconds between two looks.   Raise RendezvousError if the store fails.
    A run writes weights if fleet.broadcast_weights = true.
    """
    clock = clock or SystemClock()
    store = PatientStore(open_signed(run) if isinstance(run, str) else run, clock, PATIENCE_S)
    follower = WeightsFollower(store, emit)
    step, quiet_s = -1, 0.0
    while until is None or (step < until and quiet_s < LATE_S):
        if (weights := follower.poll()) is None:
            over = until is not None and until > 0 and store.get(layout.commit_key(until - 1)) is not None
            quiet_s += poll_s if over else 0.0
            clock.sleep(poll_s)
        else:
            step, quiet_s = weights.step, 0.0
            yield weights
