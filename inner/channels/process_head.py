"""A process reward model: a small head on the start model's hidden states, trained on recorded teachers' actions.

    … <assistant> <call> t3_9 a 4 b 5 </call> <end>
                │ └──────────── the turn ──────────┘
                h_context          mean of h                        h: (D,), the start model's hidden states after
                └──────┬───────────────┘                               half of its layers: those of the last layers
                   LayerNorm ─▶ 2·D → 32 → 1 ─▶ σ ─▶ score in [0, 1]   predict the next token and say little else

    training    each action X that a teacher or the student took in a state; its label is its share p_X of the
                teachers' votes (Math-Shepherd also trains on shares of rollouts, arXiv 2312.08935)
    a run       inner.process.head = "head.safetensors": needs no teacher any more

Not promised: good scores in states unlike the traces' states, or for a policy that has learned to exploit the head.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from inner.channels.head_file import HEAD_FORM, read_head_width
from inner.channels.lessons import Rollout
from inner.channels.process_reward import ProcessReward, TurnScore
from inner.channels.teacher import DistillationTeacher
from inner.channels.terms import backbone_states, eval_mode, pad_rows
from inner.channels.turn_ids import context_and_actions, renderer
from inner.errors import InnerError
from inner.models.causal_lm import causal_lm
from inner.models.precision import uncached_autocast
from inner.replay.commands import Key, key_of
from inner.replay.pairs import count_votes
from inner.replay.states import TraceState
from inner.replay.teachers import TeacherAction
from inner.settings.channels import WHOLE_SEQUENCE_LOSSES

HIDDEN = 32
AT_ONCE = 32  # rows per forward pass

Place = tuple[int, int, int]  # row, the turn's start and end: row[start:end]


class ProcessHead(nn.Module):
    """The head: features (N, 2·D) -> logits (N,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.body = nn.Sequential(
            nn.LayerNorm(2 * width), nn.Linear(2 * width, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1)
        )

    def forward(self, features_N_F: Tensor) -> Tensor:
        return self.body(features_N_F)[:, 0]

    def save(self, path: str | Path) -> None:
        from safetensors.torch import save_file

        save_file(self.state_dict(), str(path), {"form": HEAD_FORM, "width": str(self.width)})

    @classmethod
    def load(cls, path: str | Path) -> "ProcessHead":
        """Load a head.   Raises InnerError for a file that `save` did not write."""
        from safetensors.torch import load_file

        head = cls(read_head_width(Path(path)))
        head.load_state_dict(load_file(str(path)))
        return head.eval().requires_grad_(False)


# -------------------------------------------------------------------- in a run


def open_process(process: ProcessReward, loss_type: str, student: nn.Module) -> ProcessReward:
    """Return the process reward, ready to score: a ProcessHead is joined with the start model.

    loss_type: as in TRL.   student: the start model.   Raises InnerError for a loss that cannot use turn scores."""
    if loss_type in WHOLE_SEQUENCE_LOSSES:
        raise InnerError(
            "a process reward gives each turn an advantage of its own, and the formula of the loss "
            f"{loss_type!r} has one advantage per rollout. Use another objective, or leave `process` out."
        )
    if not isinstance(process.score, ProcessHead):
        return process
    return replace(process, score=HeadScore(process.score, student))


class HeadScore:
    """A process reward: the head scores each turn on the start model's hidden states.

    student: the start model, whose trainable weights are copied once."""

    def __init__(self, head: ProcessHead, student: nn.Module) -> None:
        width = student_width(student)
        if head.width != width:
            raise InnerError(
                f"the process head was trained on states of {head.width} numbers, and this model's states have "
                f"{width}. Train it with the model that the run starts from (inner.model)."
            )
        self._head = head
        self._start = DistillationTeacher("frozen", student, ema_rate=0.0)
        self.__name__ = "process_head"

    def __call__(self, rollouts: Sequence[Rollout]) -> list[list[TurnScore]]:
        rows = [rollout.prompt + rollout.ids for rollout in rollouts]
        places = [
            (i, len(rollout.prompt) + turn.start, len(rollout.prompt) + turn.end)
            for i, rollout in enumerate(rollouts)
            for turn in rollout.turns
        ]
        device = next(self._start.model.parameters()).device
        with self._start.in_place(device):
            features = all_features(self._start.model, rows, places, device)
        scores = iter(torch.sigmoid(self._head.to(device)(features)).tolist() if len(features) else ())
        return [[next(scores) for _ in rollout.turns] for rollout in rollouts]


def _parts(rows: Sequence[list[int]], places: Sequence[Place]) -> Iterable[tuple[list[list[int]], list[Place]]]:
    """Yield AT_ONCE rows at a time, with the turns in them."""
    for first in range(0, len(rows), AT_ONCE):
        last = min(first + AT_ONCE, len(rows))
        at = [(row - first, start, end) for row, start, end in places if first <= row < last]
        if at:
            yield list(rows[first:last]), at


@torch.no_grad()
def all_features(model: nn.Module, rows: Sequence[list[int]], places: Sequence[Place], device: torch.device) -> Tensor:
    """Return (N, 2·D) fp32: the hidden state before each turn, and the mean over the turn's tokens."""
    found = [torch.empty(0, 2 * student_width(model), device=device)]
    for part, at in _parts(rows, places):
        states_B_T_D = middle_states(model, *pad_rows(part, device)).float()
        found += [
            torch.cat((states_B_T_D[row, max(start - 1, 0)], states_B_T_D[row, start : max(end, start + 1)].mean(0)))[
                None
            ]
            for row, start, end in at
        ]
    return torch.cat(found)


def middle_states(model: Any, ids_B_T: Tensor, mask_B_T: Tensor) -> Tensor:
    """Return the hidden states after half of the layers, (B, T, D).   Raises InnerError without a list of layers."""
    lists = [m for m in causal_lm(model).base_model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise InnerError(f"{type(causal_lm(model)).__name__} has no list of layers for a head. Use another model.")
    layers = max(lists, key=len)
    caught: list[Tensor] = []

    def catch(module: Any, arguments: Any, output: Any) -> None:
        caught.append(output[0] if isinstance(output, tuple) else output)

    hook = layers[(len(layers) - 1) // 2].register_forward_hook(catch)
    try:
        backbone_states(model, ids_B_T, mask_B_T)
    finally:
        hook.remove()
    return caught[0]


def student_width(model: Any) -> int:
    return causal_lm(model).get_output_embeddings().weight.shape[1]


# -------------------------------------------------------------------- training


@dataclass(frozen=True)
class Example:
    """One action in one state.   label: the action's share of the teachers' votes."""

    row: list[int]
    start: int
    label: float


def train_process_head(
    model: nn.Module,
    tokenizer: Any,
    states: Sequence[TraceState],
    actions: Iterable[TeacherAction],
    *,
    key: str | Key | None = None,
    steps: int = 1000,
    lr: float = 1e-2,
    seed: int = 0,
) -> tuple[ProcessHead, float]:
    """Train a head; -> the head and its last loss (nats, binary cross-entropy with soft labels).

    model: the start model of the run.   states, actions: those that a replay gives (inner.replay).
    steps: AdamW steps on 64 examples each; lr falls linearly to 0.
    Raises InnerError if no teacher answered."""
    examples = head_examples(tokenizer, states, actions, key=key)
    if not examples:
        raise InnerError(
            "no teacher answered in any of these states, so there is nothing to train a head on. Look at the replay's "
            "summary for the reasons, or give other actions."
        )
    device = next(model.parameters()).device
    places = [(i, example.start, len(example.row)) for i, example in enumerate(examples)]
    with eval_mode(model), uncached_autocast(device):
        features = all_features(model, [example.row for example in examples], places, device)
    labels = torch.tensor([example.label for example in examples], device=device)
    head = _seeded_head(student_width(model), seed).to(device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.01)
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    drawn = torch.Generator().manual_seed(seed)
    last = float("nan")
    for _ in range(steps):
        rows = torch.randint(len(examples), (64,), generator=drawn).to(device)
        loss = nn.functional.binary_cross_entropy_with_logits(head(features[rows]), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        falling.step()
        last = float(loss.detach())
    return head.eval().requires_grad_(False), last


def head_examples(
    tokenizer: Any, states: Sequence[TraceState], actions: Iterable[TeacherAction], *, key: str | Key | None = None
) -> list[Example]:
    """Return one example per distinct action in each state that has answers."""
    render = renderer(tokenizer)
    by_state: dict[str, list[TeacherAction]] = defaultdict(list)
    for action in actions:
        by_state[action["state_id"]].append(action)
    examples = []
    for state in states:
        same = key_of(key, state.get("action_form"))
        votes = count_votes(by_state[state["state_id"]], None, same)
        total = sum(vote.support for vote in votes)
        shares = {vote.key: (vote.action, vote.support / total) for vote in votes}
        if shares and (own := same(state["student_action"])):
            shares.setdefault(own, (state["student_action"], 0.0))
        try:
            context, turns = context_and_actions(state, [action for action, _ in shares.values()], render, tokenizer)
        except InnerError as error:
            raise InnerError(f"state {state['state_id']}: {error}. Take the state out.") from error
        for turn, (_, share) in zip(turns, shares.values(), strict=True):
            examples.append(Example(context + turn, len(context), share))
    return examples


def _seeded_head(width: int, seed: int) -> ProcessHead:
    """Return a new head. The process's random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ProcessHead(width)
