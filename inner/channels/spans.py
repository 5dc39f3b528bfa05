"""Find the turns in a rollout's tokens, and put a hint in front of a turn.

    completion   <call> t3_9 a 4 b 5 </call> <end> <tool> {'error': …} <end> <assistant> giveup <end>
    tool_mask      1     1   1 1 1 1    1      1     0        0         0        0          1     1
                 └──────────── turn 0 ───────────┘└────── its tool result ──────┘└──── turn 1 ────┘

    student      prompt … <assistant>            | turn k
    teacher      prompt … hint … <assistant>     | turn k        the same ids, never tokenised again

Both rows end with the turn's ids, so the k-th token of the turn in one row is paired with the k-th token in the other
row. All functions are pure, except those that call the tokenizer's template.

    TRL's tool loop     read_turns ─▶ Turn ─▶ hint ─▶ HintSplicer ─▶ Lesson                           (trainer.py)
    recorded traces     TraceState ─▶ hint ─▶ hinted_spans ─▶ Span ─▶ span_batch ─▶ compose_loss

Not promised: failed turns that TRL removed because the tool's result did not fit; TRL does not report those.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inner.channels.hints import Hint
from inner.channels.turn_ids import agreement, context_and_actions, renderer
from inner.errors import InnerError
from inner.replay.actions import Message, action_text
from inner.replay.states import TraceState, error_record

CACHED = 4096  # how many hints' ids are cached


@dataclass(frozen=True)
class Turn:
    """A turn: completion[start:end] is the model's text; `error` is its tool call's result if the call failed.

    seen  facts for the hint about a failed turn: student_action, state_messages (of the completion), error_kind, …"""

    start: int
    end: int
    error: str | None = None
    seen: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Lesson:
    """One turn to distil: the student's completion[start:end], and the teacher's row that ends with the same ids.

    written  per token: 1 if the model wrote it, 0 for a tool result; () if the model wrote all"""

    start: int
    end: int
    teacher_ids: list[int]
    written: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """A teacher's and a student's row that end with the same `length` ids, which are compared one by one."""

    student_ids: list[int]
    teacher_ids: list[int]
    length: int


# TRL's tool loop: turns and their errors


def model_turns(tool_mask: Sequence[int]) -> list[tuple[int, int]]:
    """Return [(start, end)] of the maximal runs of 1 (tokens that the model wrote)."""
    turns: list[tuple[int, int]] = []
    start: int | None = None
    for i, written in enumerate([*tool_mask, 0]):
        if written and start is None:
            start = i
        elif not written and start is not None:
            turns.append((start, i))
            start = None
    return turns


def read_turns(tool_mask: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns: the k-th run of 1s is the k-th assistant message, whose results follow as tool messages."""
    failures: list[Mapping[str, Any] | None] = []
    for at, message in enumerate(messages):
        if message.get("role") == "assistant":
            failures.append(_failure_behind(messages, at))
    spans = model_turns(tool_mask)
    failures += [None] * (len(spans) - len(failures))
    return [
        Turn(start, end) if found is None else Turn(start, end, str(found["error"]), found)
        for (start, end), found in zip(spans, failures, strict=False)
    ]


def _failure_behind(messages: Sequence[Mapping[str, Any]], at: int) -> Mapping[str, Any] | None:
    """Return facts about the assistant's message `at` if one of its calls failed (the first failed one); else None."""
    for i, result in enumerate(messages[at + 1 :]):
        if result.get("role") != "tool":
            return None
        if record := error_record(result.get("content")):
            action = action_text({"tool_calls": _call_behind(messages[at].get("tool_calls") or [], i, result)})
            return {**record, "student_action": action, "state_messages": list(messages[:at])}
    return None


def _call_behind(calls: list[Mapping[str, Any]], i: int, result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return [the call of the i-th result], or []. TRL puts the results of async tools after the others."""
    there = [call for call in calls[i : i + 1] + calls if "function" in call]
    named = [call for call in there if call["function"]["name"] == result.get("name", call["function"]["name"])]
    return named[:1]


# Splicing


def splice_hint(context: list[int], hint: list[int], opening: list[int], turn: list[int]) -> list[int]:
    """Return the context with the hint before its `opening`, + turn, as ids.

    The context may end with a part of the opening (turn_ids.py); a context without any part of it gets the whole
    opening."""
    parts = (n for n in range(len(opening), 0, -1) if context[-n:] == opening[:n])
    end = next(parts, 0)
    return context[: len(context) - end] + hint + (opening[:end] or opening) + turn


class HintSplicer:
    """Put a hint in front of a turn, as the chat template writes messages.

    render(messages, opened) -> ids; with `opened`, they end with the opening of an assistant's turn

    The hint is a message of the role "system", or else "user", after a message of the role "user". If the template
    refuses both, as Mistral's and Gemma's templates do, the hint has the role "user", after a message of the role
    "assistant". Some templates, such as Mistral's, open an assistant's turn with no ids."""

    def __init__(self, render: Callable[[list[Message], bool], list[int]]) -> None:
        self._render = render
        self._cache: dict[str, list[int]] = {}
        self._before, self.opening, self.role = self._read_template()

    def __call__(self, context: list[int], hint: str, turn: list[int]) -> list[int]:
        """Return the teacher's row."""
        return splice_hint(context, self.hint_ids(hint), self.opening, turn)

    def hint_ids(self, hint: str) -> list[int]:
        """Return the hint's ids after other messages. If a hint is rendered alone, some templates add a system
        prompt."""
        if hint not in self._cache:
            if len(self._cache) >= CACHED:
                self._cache.clear()
            whole = hint.encode(errors="replace").decode()  # a tool's error may have half a character
            hinted = self._render([*self._before, {"role": self.role, "content": whole}], True)
            start = len(self._render(self._before, True)) - len(self.opening)
            self._cache[hint] = hinted[start : len(hinted) - len(self.opening)]
        return self._cache[hint]

    def _read_template(self) -> tuple[list[Message], list[int], str]:
        """Return messages that may stand before a hint, the ids that open an assistant's turn, and the hint's role."""
        refused: Exception | None = None
        for before, role in ((_ASK, "system"), (_ASK, "user"), (_TOLD, "user")):
            try:
                opening = self._opening_behind(before, role)
            except Exception as error:  # a template that refuses a role may raise any jinja error
                refused = error
                continue
            if opening is not None:
                return before, opening, role
        why = f" ({type(refused).__name__}: {refused})" if refused is not None else ""
        raise InnerError(
            f"this model's chat template takes no hint between a message and the assistant's turn{why}. Use another "
            "template, or turn the distillation off: inner.sdpo.weight = 0 (a trainer's keyword: alpha_sdpo = 0)."
        )

    def _opening_behind(self, before: list[Message], role: str) -> list[int] | None:
        """Return the ids that open an assistant's turn; None if a hint of this role is not directly before them."""
        opened, hinted = (self._render(turns, True) for turns in (before, [*before, {"role": role, "content": "c"}]))
        opening = opened[agreement(opened, self._render(before, False)) :]
        start, end = len(opened) - len(opening), len(hinted) - len(opening)
        return opening if hinted[:start] == opened[:start] and hinted[end:] == opening and end > start else None


_ASK: list[Message] = [{"role": "user", "content": "a"}]
_TOLD: list[Message] = [*_ASK, {"role": "assistant", "content": "b"}]


# Recorded traces


def hinted_spans(states: Iterable[TraceState], hint: Hint, tokenizer: Any) -> list[Span]:
    """Return one span per failed state for which there is a hint."""
    render = renderer(tokenizer)
    splice = HintSplicer(render)
    spans = []
    for state in states:
        error = state.get("error")
        text = hint(state, error) if error else None
        if text is None:
            continue
        context, (action,) = context_and_actions(state, [state["student_action"]], render, tokenizer)
        spans.append(Span(context + action, splice(context, text, action), len(action)))
    return spans


def span_batch(spans: Sequence[Span], pad_id: int = 0) -> dict[str, Any]:
    """Return the spans as a batch for compose_loss: padded on the right, with masks of the spans' own tokens."""
    student_ids, student_mask, marked = _pad_and_mark([s.student_ids for s in spans], [s.length for s in spans], pad_id)
    teacher_ids, teacher_mask, teacher_marked = _pad_and_mark(
        [s.teacher_ids for s in spans], [s.length for s in spans], pad_id
    )
    return {
        "input_ids": student_ids,
        "attention_mask": student_mask,
        "response_mask": marked,
        "sdpo_loss_mask": marked,
        "ctx_teacher_input_ids": teacher_ids,
        "ctx_teacher_attention_mask": teacher_mask,
        "ctx_teacher_loss_mask": teacher_marked,
    }


def _pad_and_mark(rows: Sequence[list[int]], lengths: Sequence[int], pad_id: int) -> tuple[Any, Any, Any]:
    """Return ids, attention mask, and the mask of each row's last `length` tokens; (B, T) each."""
    import torch

    width = max((len(row) for row in rows), default=0)
    ids = [row + [pad_id] * (width - len(row)) for row in rows]
    mask = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
    last = [[0] * (len(r) - n) + [1] * n + [0] * (width - len(r)) for r, n in zip(rows, lengths, strict=True)]
    return torch.tensor(ids), torch.tensor(mask), torch.tensor(last)
