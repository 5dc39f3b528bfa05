"""Build lessons: the context that the self-teacher reads, and the rollout's tokens that the self-teacher scores.

    hint      prompt … hint … <assistant>                       │ a turn that failed        one lesson per such turn
    rollout   prompt … a sibling's success, the errors … <assistant> │ the whole response   one lesson per rollout

"rollout" is the SDPO paper's context (Hübotter et al.; the reprompt as in lasgroup/SDPO). This context has two parts:
the first sibling (another rollout of the prompt) with enough reward, and the errors of the rollout's own failed calls.
A rollout with neither part gets no lesson. The teacher sees tool results, but the student does not learn their tokens.

A rollout that reached max_completion_length gives a lesson like any other, even if mask_truncated_completions removes
it from the policy loss. The mask exists because such a rollout's reward is noise, and a lesson does not use the
reward of the rollout that it corrects (docs/internals/decisions/013).

Not promised: the reprompt inside the user's message. The reprompt is a separate message after the prompt, so the prompt
has the same ids as in sampling.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inner.channels.hints import Hint, shorten_middle
from inner.channels.spans import HintSplicer, Lesson, Turn

SOLUTION = "Correct solution:\n\n{}\n\n"
FEEDBACK = "The following is feedback from your unsuccessful earlier attempt:\n\n{}\n\n"
AGAIN = "Correctly solve the original question."


@dataclass(frozen=True)
class Rollout:
    """One row of TRL's batch.   ids: the completion's token ids, without padding, truncated or not.
    written: 1 if the model wrote the token.   reward: NaN if unknown.   completion: messages, or a text.
    tools: JSON schemas of the tools that the model had."""

    row: Mapping[str, Any]
    prompt: list[int]
    ids: list[int]
    written: tuple[int, ...]
    turns: list[Turn]
    reward: float
    completion: Any = ""
    tools: Sequence[Mapping[str, Any]] = ()


def hint_lessons(
    rollouts: Sequence[Rollout], hint: Hint, hint_context: Callable[..., dict[str, Any]], splice: HintSplicer
) -> list[list[Lesson]]:
    """Return the lessons of each rollout. hint_context(row, turn) -> first argument of `hint`. Call `prepare` first."""
    failed = [[(turn, hint_context(r.row, turn)) for turn in r.turns if turn.error is not None] for r in rollouts]
    if prepare := getattr(hint, "prepare", None):
        prepare([(seen, turn.error) for each in failed for turn, seen in each])
    return [
        [
            aligned_lesson(
                r, turn.start, turn.end, splice(r.prompt + r.ids[: turn.start], text, r.ids[turn.start : turn.end])
            )
            for turn, seen in each
            if (text := hint(seen, str(turn.error))) is not None
        ]
        for r, each in zip(rollouts, failed, strict=True)
    ]


def aligned_lesson(
    rollout: Rollout, start: int, end: int, teacher_ids: list[int], written: tuple[int, ...] = ()
) -> Lesson:
    """Return the lesson. Raises RuntimeError unless the teacher's row ends with the rollout's tokens start … end - 1.

    The loss compares the turn's tokens with the last tokens of the row, one by one. With any other row the model would
    learn other text (the hint's tokens, for example), and the loss would not show it."""
    turn = rollout.ids[start:end]
    if not 0 <= start < end or len(turn) != end - start or teacher_ids[start - end :] != turn:
        raise RuntimeError(
            f"the teacher's row does not end with the student's turn. The turn is tokens {start} to {end - 1} of a "
            f"completion with {len(rollout.ids)} tokens: {turn[:8]} …; the row ends with "
            f"{teacher_ids[start - end :][:8]} …. The cause is a defect of this package or an unsupported TRL. Use trl "
            "1.16, or train without the channel: inner.sdpo.weight = 0 (a trainer's keyword: alpha_sdpo = 0). Please "
            "report it with the chat template."
        )
    return Lesson(start, end, teacher_ids, written)


def rollout_lessons(
    rollouts: Sequence[Rollout], group: int, success: float, decode: Callable[[list[int]], str], splice: HintSplicer
) -> list[list[Lesson]]:
    lessons = []
    for i, rollout in enumerate(rollouts):
        first = i // group * group
        siblings = [j for j in range(first, first + group) if j != i and rollouts[j].reward >= success]
        solution = decode(rollouts[siblings[0]].ids) if siblings else ""
        text = reprompt(solution, [turn.error for turn in rollout.turns if turn.error])
        use = text is not None and any(rollout.written)
        found = splice(rollout.prompt, text or "", rollout.ids) if use else []
        lessons.append([aligned_lesson(rollout, 0, len(rollout.ids), found, rollout.written)] if use else [])
    return lessons


def reprompt(solution: str, errors: Sequence[str]) -> str | None:
    """Return the text that the paper appends to the question; None without a solution and without errors."""
    parts = [SOLUTION.format(solution.strip())] if solution.strip() else []
    parts += [FEEDBACK.format("\n".join(shorten_middle(error) for error in errors))] if errors else []
    return "".join([*parts, AGAIN]) if parts else None
