"""Four actors, each in its own process, wrap the inner loop, the sampler, the self-teacher and the client of teachers.

    TrainerActor        run_round(t, θ_t, carried, n) ─▶ Round          rounds.py
    GeneratorActor      generate(Generation)          ─▶ Completions    wire.py
    SDPOTeacherActor    logits(Teaching)              ─▶ (N, V)         inner/channels/teacher.py
    TeacherReplayActor  answer(states)                ─▶ actions        inner/replay/ask.py

The last three keep only state that a caller can restore: `load` brings weights, and the ledger on disk has the paid
answers.  The trainer asks its ReplicaActor for each other actor once, and again after that actor's process is lost.

Endpoints are plain functions: each actor runs them in its own thread, so they may wait for another actor.

Not promised: one GPU per actor; each uses the first GPU that it sees.
"""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from monarch.actor import endpoint  # pyright: ignore[reportMissingImports]
from torch import Tensor

from inner.channels.teacher import DistillationTeacher
from inner.channels.terms import Turns
from inner.errors import InnerError
from inner.extras.monarch.members import GENERATOR, SDPO_TEACHER, TRAINER, Member, RoleActor, replay_role
from inner.extras.monarch.rounds import (
    Carried,
    Round,
    RoundTrainer,
    Weights,
    read_weights,
    refuse_unrepeatable,
    write_weights,
)
from inner.extras.monarch.wire import (
    Completions,
    Generation,
    Teaching,
    generate,
    products,
    read_random_state,
    write_random_state,
)
from inner.models.precision import casts_products, gpu_has_bfloat16
from inner.replay.ask import ReplayStopped, replay_trace
from inner.replay.states import TraceState
from inner.replay.teachers import Teacher, TeacherAction
from inner.settings.inner import InnerConfig, InnerLoop, Seeds, Theta
from inner.train.build import load_start


@dataclass(frozen=True)
class ReplicaPlan:
    """The input of one replica's actors; all its processes read the same files.

    config: InnerConfig.to_dict().   model_dir: see publish_model.   files: kind of file -> path.   steps: H.
    replay_actors: the number of replay actors, 0 without teachers.   teachers, max_usd, ledger: shared by all replay
    actors. restarts: how often a role is started again after a death."""

    config: dict[str, Any]
    model_dir: str
    files: dict[str, str]
    seeds: Seeds
    steps: int
    teachers: tuple[Teacher, ...] = ()
    max_usd: float = 0.0
    ledger: str = ""
    replay_actors: int = 0
    restarts: int = 10

    @property
    def inner(self) -> InnerConfig:
        return InnerConfig.from_dict(self.config)

    def check(self) -> None:
        """Raise InnerError, before any actor starts, for a plan with which an actor would fail."""
        config = self.inner
        refuse_unrepeatable(config, self.steps)
        if config.loop != "grpo" or config.vllm is not None:
            raise InnerError(
                "these actors generate with transformers for a loop that learns from rewards. Set inner.loop = "
                '"grpo", and leave [inner.vllm] out.'
            )
        if config.sdpo.is_used and config.sdpo.teacher not in ("round", "frozen"):
            raise InnerError(
                f'inner.sdpo.teacher = "{config.sdpo.teacher}" changes at each inner step, and an SDPOTeacherActor '
                'is given weights once per round. Use "round" or "frozen".'
            )
        if bool(self.teachers) != bool(self.replay_actors) or (self.teachers and not self.ledger):
            raise InnerError(
                f"{len(self.teachers)} teachers for {self.replay_actors} replay actors, ledger {self.ledger!r}. Give "
                "all three, or none. With a ledger, answers of a killed actor are not paid for again."
            )


class GeneratorActor(RoleActor):
    """A copy of the policy that samples."""

    def __init__(self, plan: ReplicaPlan) -> None:
        super().__init__(GENERATOR)
        self._model = _policy(plan)

    @endpoint
    def load(self, weights: Weights) -> None:
        write_weights(self._model, weights)

    @endpoint
    def generate(self, asked: Generation) -> Completions:
        return generate(self._model, asked)


class SDPOTeacherActor(RoleActor):
    """The policy at the beginning of the outer step, or of the run ("frozen"); this teacher sees the hint."""

    def __init__(self, plan: ReplicaPlan) -> None:
        super().__init__(SDPO_TEACHER)
        self._model = _policy(plan)
        self._teacher = DistillationTeacher("live", self._model, ema_rate=0.0)

    @endpoint
    def load(self, weights: Weights) -> None:
        write_weights(self._model, weights)

    @endpoint
    def logits(self, asked: Teaching) -> Tensor:
        """Return the teacher's logits, (N, V), on the CPU."""
        device = next(self._model.parameters()).device
        with products(device, asked.casts):
            return self._teacher.logits(asked.rows, asked.turns, device).cpu()


class TeacherReplayActor(RoleActor):
    """One of a pool of teachers' clients, with an equal part of max_usd and its own ledger.   index: its number."""

    def __init__(self, plan: ReplicaPlan, index: int) -> None:
        super().__init__(replay_role(index))
        self._teachers = plan.teachers
        self._max_usd = plan.max_usd / plan.replay_actors
        self._ledger = f"{plan.ledger}.{index}"

    @endpoint
    def answer(self, states: list[TraceState]) -> list[TeacherAction]:
        """Return the teachers' actions; actions in the ledger are free.   Raises InnerError if the replay stops."""
        options: dict[str, Any] = {"ledger": self._ledger, "progress": False}
        try:
            return list(asyncio.run(replay_trace(states, self._teachers, self._max_usd, **options)))
        except ReplayStopped as stopped:  # this error cannot be pickled; the ledger has the finished answers
            raise InnerError(str(stopped)) from None


class TrainerActor(RoleActor):
    """The inner loop; other actors generate, and compute the self-teacher's logits."""

    def __init__(self, plan: ReplicaPlan, replica: Any) -> None:
        super().__init__(TRAINER)
        _let_process_rewards_ask(replica, plan.replay_actors)
        self._trainer = RoundTrainer(
            plan.inner,
            Path(plan.model_dir),
            {kind: Path(path) for kind, path in plan.files.items()},
            plan.seeds,
            steps=plan.steps,
            fit=lambda loop: put_stand_ins(loop, plan, replica),
        )

    @endpoint
    def run_round(self, t: int, weights: Weights, carried: Carried | None, replicas: int) -> Round:
        return self._trainer.run(t, weights, carried, replicas=replicas)


# ---------------------------------------------------------------- in the trainer's process


def put_stand_ins(loop: InnerLoop, plan: ReplicaPlan, replica: Any) -> None:
    """Replace the loop's generation and self-teacher by other actors."""
    trainer: Any = loop.trainer  # type: ignore[attr-defined]
    config = plan.inner
    casts = casts_products(config.autocast, config.dtype, gpu_has_bfloat16())
    trainer._generate_single_turn = RemoteGenerator(trainer, Member(replica, GENERATOR), casts)
    if config.sdpo.is_used:
        trainer._teacher = RemoteTeacher(config.sdpo.teacher, Member(replica, SDPO_TEACHER), casts)


class RemoteGenerator:
    """Replacement for TRL's `_generate_single_turn` that sends weights once per generation of completions."""

    def __init__(self, trainer: Any, member: Member, casts: bool) -> None:
        self._trainer = trainer
        self._member = member
        self._casts = casts
        self._loaded: tuple[int, int] | None = None  # the generator's incarnation, and the micro-batch of its weights

    def __call__(self, prompt_ids: Any, images: Any, fields: Any, *args: Any, **options: Any) -> Any:
        """Return each completion's token ids, and None for log-probs: TRL computes them again."""
        if images is not None or fields:
            raise InnerError("a GeneratorActor takes texts, and these prompts have images. Train in one process.")
        asked = Generation(
            prompt_ids=[list(ids) for ids in prompt_ids],
            sampling=self._trainer.generation_config.to_dict(),
            random_state=read_random_state(),
            eos_ids=list(self._trainer.eos_token_ids),
            pad_to=self._trainer.pad_to_multiple_of,
            casts=self._casts,
        )
        said: Completions = self._member.ask(lambda actor: self._ask_loaded(actor, asked))
        write_random_state(said.random_state)
        return said.ids, None

    def _ask_loaded(self, actor: Any, asked: Generation) -> Completions:
        version = (self._member.incarnation, self._trainer._step)
        if version != self._loaded:
            self._member.wait(actor.load.call_one(read_weights(self._trainer.model)))
            self._loaded = version
        return self._member.wait(actor.generate.call_one(asked))


class RemoteTeacher:
    """A DistillationTeacher whose forward runs in another actor.   kind: "round" or "frozen"."""

    def __init__(self, kind: str, member: Member, casts: bool) -> None:
        self._kind = kind
        self._member = member
        self._casts = casts
        self._weights: Weights | None = None  # None: the start weights
        self._at = -1
        self._loaded: tuple[int, int] | None = None

    def advance(self, committed: int, inner: int, theta: Theta | None) -> None:
        if self._kind == "round" and theta is not None and committed != self._at:
            self._weights, self._at = dict(theta()), committed

    def logits(self, rows: Sequence[Sequence[int]], turns: Turns, device: torch.device) -> Tensor:
        asked = Teaching([list(row) for row in rows], list(turns), self._casts)
        said: Tensor = self._member.ask(lambda actor: self._ask_loaded(actor, asked))
        return said.to(device)

    def _ask_loaded(self, actor: Any, asked: Teaching) -> Tensor:
        version = (self._member.incarnation, self._at)
        if self._weights is not None and version != self._loaded:
            self._member.wait(actor.load.call_one(self._weights))
            self._loaded = version
        return self._member.wait(actor.logits.call_one(asked))


# ---------------------------------------------------------------- the pool of teachers' clients


class ReplayPool:
    """Teachers' answers: states -> actions, in the order of the states, for ConsensusScore or the replay of pairs.

    Each of K actors asks about every K-th state. A restarted actor finds its earlier answers in its ledger."""

    def __init__(self, replica: Any, size: int) -> None:
        self._members = [Member(replica, replay_role(index)) for index in range(size)]

    def __call__(self, states: Sequence[TraceState]) -> list[TeacherAction]:
        shares = [list(states[index :: len(self._members)]) for index in range(len(self._members))]
        asked = [(member, share) for member, share in zip(self._members, shares, strict=True) if share]
        with ThreadPoolExecutor(max(1, len(asked))) as threads:
            answers = list(threads.map(lambda pair: _ask_share(*pair), asked))
        place = {state["state_id"]: number for number, state in enumerate(states)}
        return sorted(chain.from_iterable(answers), key=lambda action: place[action["state_id"]])


def _ask_share(member: Member, states: list[TraceState]) -> list[TeacherAction]:
    return member.ask(lambda actor: member.wait(actor.answer.call_one(states)))


_pool: ReplayPool | None = None


def ask_pool(states: Sequence[TraceState]) -> list[TeacherAction]:
    """Ask the replay actors of this trainer's replica. In a process reward: `score = ConsensusScore(ask_pool)`.

    Raises InnerError in any other process."""
    if _pool is None:
        raise InnerError(
            "this process is not a TrainerActor with replay actors. Set teachers and replay_actors in ReplicaPlan."
        )
    return _pool(states)


def _let_process_rewards_ask(replica: Any, size: int) -> None:
    global _pool
    _pool = ReplayPool(replica, size) if size else None


def _policy(plan: ReplicaPlan) -> Any:
    """Return the start model as in the inner loop, on the GPU if there is one."""
    config = plan.inner
    model = load_start(Path(plan.model_dir), config.dtype, config.lora)[0]
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
