"""The manager of a replica of K ranks: rank 0 acts, and every rank knows the outcome.

    OuterLoop, torchft  ──▶  Led  ──▶  rank 0: StoreManager (claim, offer, settle, commit, leave)
    on every rank             └──────  all: get rank 0's Word: the outcome, the value, and its present state

    once per inner step   progress ─▶ Word: leaving, fenced, behind, h_cap, done, the replica's pace
    once per sync         allreduce, wait, finish_round, catch_up ─▶ a Word each

So the ranks take each branch of the outer loop together, and no hook asks which rank it is.  If rank 0 raises, the
others raise at the same call: Leaving if rank 0 raised Leaving, which ends their loops; Followed for any other error.

The numbers of all ranks are in rank 0's log: their means, and the sum of "samples".

At the first sync, ranks whose weights have moved apart are refused: each trains alone, and only rank 0's Δ counts.

Not promised: a lighthouse; Adam's moments of a session that leaves (diloco/outer/moments.py); to notice ranks that
train alone on the same rows, or have not moved.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from torch import Tensor, nn

from diloco.outer.flat import layout_of
from diloco.outer.frozen import frozen_digest
from diloco.outer.managers.stand_in import StandIn
from diloco.outer.ranks.fragment import SharedFragment
from diloco.outer.ranks.group import Group
from diloco.outer.rounds import Work
from diloco.process.ranks import Followed
from diloco.process.watchdog import Watchdog
from diloco.run.config import OuterConfigError, OuterError
from rendezvous.clock import SystemClock
from rendezvous.errors import Leaving

if TYPE_CHECKING:
    from diloco.outer.loop import OuterLoop
    from diloco.outer.managers.manager import StoreManager
    from diloco.process.session import Session

DONE, LEAVES, FAILED = range(3)  # outcomes of a call on rank 0
NANO = 10**9
APART = 0.01  # limit of two ranks' difference, as a part of the larger change; ranks in step differ by rounding
NOTHING = -1  # a value: no fragment, or no missed step


class Word(NamedTuple):
    """The message of rank 0 after a call.   value: the result.   step, participants, h_cap: after the call."""

    outcome: int = DONE
    value: int = 0
    step: int = 0
    participants: int = 0
    h_cap: int = 0
    leaving: int = 0
    fenced: int = 0
    behind: int = 0
    alone: int = 0
    done: int = 0
    left: int = 0


class Led(StandIn):
    """torchft's names and the OuterRounds of a replica of several ranks.

    make: makes rank 0's manager; None on other ranks.   Raises an error of `make` on rank 0, Followed on the others."""

    def __init__(self, group: Group, make: "Callable[[], StoreManager] | None" = None) -> None:
        self.group = group
        self.rounds = self
        self.leader: StoreManager | None = None
        self.watchdog = Watchdog(SystemClock())
        self.stats: Callable[[], dict[str, float]] = dict
        self.why = ""
        self.round_began = 0.0  # seconds by which an evaluation has delayed the begin of rank 0's round
        self._merged: dict[str, float] = {}
        self._fragments: list[SharedFragment] = []  # empty after the first sync, which compares the ranks
        self._told: BaseException | None = None  # the error that the other ranks already know
        self._hear(Word())
        self._lead(lambda: self._begin(make))

    def _begin(self, make: "Callable[[], StoreManager] | None") -> None:
        assert make is not None, "rank 0 has a manager"
        self.leader = make()
        self.watchdog = self.leader.rounds.watchdog
        self.leader.rounds.stats = lambda: self._merged

    @property
    def session(self) -> "Session | None":
        """The slot's session, on rank 0; None elsewhere."""
        return None if self.leader is None else self.leader.session

    def ask_to_leave(self, why: str = "asked to leave") -> None:
        """Let the replica leave. A launcher asks every rank, and rank 0 acts for all."""
        if self.leader is not None:
            self.leader.ask_to_leave(why)

    def fragment(self, live: Sequence[nn.Parameter]) -> SharedFragment:
        self._fragments.append(SharedFragment(live, self.group))
        return self._fragments[-1]

    # ---------------------------------------------------------------- rank 0's word

    def _lead(self, act: Callable[[], int | None]) -> int:
        """Act on rank 0. Return its value on every rank; if it raises an error, raise an error on every rank."""
        outcome, value, error = DONE, 0, None
        if self.group.is_main:
            try:
                value = act() or 0
            except BaseException as raised:
                if raised is self._told:  # an inner call has sent this error to the other ranks
                    raise
                self._told = error = raised
                outcome = LEAVES if isinstance(raised, Leaving) else FAILED
        try:
            self._hear(Word(*self.group.agree(*self._now(outcome, value))))
        finally:
            if error is not None:
                raise error
        if self._word.outcome == LEAVES:
            raise Leaving("rank 0 of this replica leaves")
        if self._word.outcome == FAILED:
            raise Followed("rank 0 of this replica has ended; its error is above")
        return self._word.value

    def _now(self, outcome: int, value: int) -> Word:
        if self.leader is None or outcome == FAILED:
            return Word(outcome, value)
        rounds, run = self.leader.rounds, self.leader.session.rv
        return Word(
            outcome, value, step=self.leader.current_step(), h_cap=rounds.h_cap,
            participants=self.leader.num_participants() or run.wanted.replicas,
            leaving=rounds.leaving, fenced=rounds.fenced, behind=rounds.behind,
            alone=rounds.alone, done=self.leader.done, left=rounds.left,
        )  # fmt: skip

    def _hear(self, word: Word) -> None:
        self._word = word
        self.leaving, self.fenced, self.behind = bool(word.leaving), bool(word.fenced), bool(word.behind)
        self.alone, self.done, self.left = bool(word.alone), bool(word.done), bool(word.left)
        self.h_cap = word.h_cap

    @property
    def _rounds(self) -> Any:
        """Rank 0's rounds; used only inside `_lead`."""
        return cast("StoreManager", self.leader).rounds

    def current_step(self) -> int:
        return self._word.step

    def num_participants(self) -> int:
        """Return the number of replicas in the newest outer step; before the first, of all wanted replicas."""
        return self._word.participants

    def allreduce(self, tensor: Tensor, should_quantize: bool = False, **_: Any) -> Work:
        """Offer rank 0's tensor, which is all of Δ. The returned Work waits for the commit, on every rank."""
        self._end_inner_steps()
        work: list[Work] = []
        self._lead(lambda: work.append(cast("StoreManager", self.leader).allreduce(tensor)))

        def finish() -> None:
            self._lead(lambda: work[0].wait())

        return Work(finish)

    # ---------------------------------------------------------------- the OuterRounds

    def join(self, loop: "OuterLoop") -> None:
        """Let rank 0 heal. Raise OuterError if the ranks have other settings, or other models."""
        frozen = frozen_digest(loop.model) if self._lead(lambda: self._rounds.founds) else ""
        seen = self.group.gather({"the outer settings": loop.mathematics(), "the model": layout_of(loop.model)})

        def act() -> None:
            refuse_unequal(seen)
            self._rounds.frozen = frozen
            self._rounds.join(loop)

        self._lead(act)

    def progress(self, inner: int, rate: float) -> float:
        def act() -> int:
            self._rounds.progress(inner, rate)
            return round(rate * NANO)

        return self._lead(act) / NANO

    def offer(self, delta: np.ndarray, h: int) -> None:
        self._end_inner_steps()
        self._lead(lambda: self._rounds.offer(delta, h))

    def finish_round(self) -> int | None:
        def act() -> int:
            fragment = self._rounds.finish_round()
            return NOTHING if fragment is None else fragment

        fragment = self._lead(act)
        return None if fragment == NOTHING else fragment

    def catch_up(self, late: Callable[[int], None]) -> None:
        """Apply the missed steps on rank 0; before each, call `late(step)` on every rank."""
        if not self.group.is_main:
            return self._follow(late)

        def told(step: int) -> None:
            self._lead(lambda: step)
            late(step)

        self._lead(lambda: self._rounds.catch_up(told) or NOTHING)

    def _follow(self, late: Callable[[int], None]) -> None:
        while (step := self._lead(lambda: None)) != NOTHING:
            late(step)

    def close(self, reason: str) -> None:
        self._lead(lambda: self._rounds.close(self._rounds.why if reason != "done" else reason))

    def _end_inner_steps(self) -> None:
        """Send the round's numbers of all ranks to rank 0. Refuse ranks that did not train together."""
        self._merged = merged_numbers(self.group.gather(self.stats()))
        if self._fragments:
            moves = self.group.gather([move for fragment in self._fragments for move in fragment.moves()])
            self._fragments = []
            self._lead(lambda: refuse_apart(moves))
        if self.leader is not None:
            self.leader.rounds.round_began += self.round_began
        self.round_began = 0.0


def merged_numbers(of_ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each number over the ranks that have it; the sum of "samples"."""
    names = dict.fromkeys(name for numbers in of_ranks for name in numbers)
    found = {name: [numbers[name] for numbers in of_ranks if name in numbers] for name in names}
    return {name: sum(values) / (1 if name == "samples" else len(values)) for name, values in found.items()}


def refuse_unequal(of_ranks: Sequence[dict[str, Any]]) -> None:
    """Raise OuterError for the first rank that differs from rank 0.   of_ranks: name -> value, for each rank."""
    for rank, theirs in enumerate(of_ranks):
        for what, ours in of_ranks[0].items():
            if theirs[what] != ours:
                raise OuterError(
                    f"rank {rank} of this replica differs from rank 0 in {what}: {_difference(ours, theirs[what])}. "
                    "Start all ranks with the same script and settings"
                )


def refuse_apart(moves: Sequence[Sequence[float]]) -> None:
    """Raise OuterConfigError for ranks whose weights have moved apart.   moves: the moves of each rank's parameters."""
    ours, *others = map(np.array, moves)
    for rank, theirs in enumerate(others, 1):
        if np.linalg.norm(theirs - ours) > APART * max(np.linalg.norm(ours), np.linalg.norm(theirs)):
            raise OuterConfigError(
                f"the ranks of this replica do not train together: at the first sync, rank {rank} has other weights "
                "than rank 0, whose work alone would count. Let DistributedDataParallel or FSDP2 (fully_shard) hold "
                "the model before the training, or start one process for each replica"
            )


def _difference(ours: Any, theirs: Any) -> str:
    if isinstance(ours, dict):
        name = next(name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name))
        return f"{name} is {ours.get(name)!r} on rank 0, {theirs.get(name)!r} there"
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return f"parameter {at} is {ours[at : at + 1]} on rank 0, {theirs[at : at + 1]} on this rank"
