"""Trains GRPO with two more loss terms, as a subclass of TRL's GRPOTrainer (policy.py has GRPO only).

    total = policy_weight · grpo + α · sdpo + β · replay      each term / gradient accumulation steps, like TRL's loss

    rollout   prompt │ turn 0: <call> t3_9 … │ {'error': …} │ turn 1 …
                     └────────┬──────────────┘
    teacher   prompt + hint │ turn 0           one forward, without gradient
    student   GRPO's own forward: a hook takes its backbone output, so the student needs no second one
    replay    pairs (prompt, chosen, rejected) one forward, with gradient

context = "hint" is the method of Cursor's Composer (a hint at the failed turn, a loss beside RL's loss), with the
divergence of OPSD. "rollout" is the method of the SDPO paper: it scores whole responses again, and replaces the policy
gradient (policy_weight = 0).

With α = β = 0, loss and gradients are TRL's, bit for bit, with no extra forward. A term without tokens or pairs in a
batch runs no forward: the term is a 0 that is connected to the graph.

Not promised: several ranks (rank_channels.py); vision models; that a good α is also good for another `sdpo_jsd_beta`.
"""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor, nn

from inner.channels.hints import Hint, templates
from inner.channels.lessons import Rollout, hint_lessons, rollout_lessons
from inner.channels.process_head import open_process
from inner.channels.process_reward import ProcessReward, ScoredSpan, process_advantages, score_steps
from inner.channels.reference import ReplayPairs, pair_logprobs
from inner.channels.spans import HintSplicer, Lesson, Turn, read_turns
from inner.channels.teacher import DistillationTeacher
from inner.channels.terms import (
    causal_lm,
    distillation_loss,
    logits_at,
    preference_loss,
    self_distillation_loss,
    tap_gradient_norm,
)
from inner.data.order import Share, step_in_generation
from inner.data.template_fault import require_template
from inner.host import Host
from inner.losses.divergence import zero_on_graph
from inner.replay.pairs import DPOPair
from inner.settings.channels import linear_ramp
from inner.settings.inner import InnerError
from inner.settings.keywords import channels_from_keywords, pop_channel_settings
from inner.train.policy import PolicyTrainer
from inner.usercode.forgiving import ForgivingHint, ForgivingProcess

# Key of TRL's batches: one list of lessons per rollout. TRL's shuffle and split keep lists and rollouts aligned.
LESSONS = "sdpo_lessons"


class ComposerReplicationTrainer(PolicyTrainer):
    """TRL's GRPOTrainer with further keywords:

    objective         which objective `args` must have (make_po_config makes such args); None: not checked
    alpha_sdpo        weight of the distillation; 0 is off
    beta_replay       weight of the preference term on `pairs`; 0 is off
    pairs             DPOPairs, or the path of a .jsonl file of DPOPairs
    hint              (row, error) -> text or None; default: templates over the error and the tools (channels/hints.py)
    sdpo_teacher      "round", "frozen", "ema", "live", or a model with the same vocabulary
    process           a ProcessReward: it scores single turns, and advantages become (B, T); None: off
    has_agent         whether an agent of the user, with its own tools, will make the rollouts
    data_seed, start  data order as a pure function of (data_seed, inner step), from inner step `start` on;
                      without data_seed: TRL's own sampler, and args.seed orders the pairs
    share             replaces data_seed for a replica that reads a part of the rows (inner/data/order.py)
    and every channel setting under its name in inner/settings/flat_names.py. All other keywords are TRL's.
    """

    def __init__(
        self,
        *args: Any,
        alpha_sdpo: float = 0.0,
        beta_replay: float = 0.0,
        sdpo_teacher: str | nn.Module = "round",
        pairs: Sequence[DPOPair] | str | Path | None = None,
        hint: Hint | None = None,
        process: ProcessReward | None = None,
        has_agent: bool = False,
        **kwargs: Any,
    ) -> None:
        other = sdpo_teacher if isinstance(sdpo_teacher, nn.Module) else None
        self.channels = channels_from_keywords(
            alpha_sdpo=alpha_sdpo,
            beta_replay=beta_replay,
            sdpo_teacher="frozen" if isinstance(sdpo_teacher, nn.Module) else sdpo_teacher,
            **pop_channel_settings(kwargs),
        )
        self.reads_turns = self.channels.sdpo.is_used or process is not None
        self._has_agent = has_agent
        for row in islice(kwargs.get("train_dataset") or (), 1):
            require_template(kwargs.get("processing_class"), row.get("prompt", ""))
        super().__init__(*args, **kwargs)
        self._turns: list[list[Turn]] | None = None  # turns of each rollout of the last generation, with failed calls
        self.alpha_sdpo = alpha_sdpo
        self.beta_replay = beta_replay
        self.hint = hint or templates
        self._forgiving: Hint | None = None
        model = self.accelerator.unwrap_model(self.model)
        self._process = None if process is None else open_process(process, self.loss_type, model)
        self._score_steps: Callable[[Sequence[Rollout]], list[ScoredSpan]] | None = (
            None if self._process is None else partial(score_steps, self._process)
        )
        # TRL also excludes truncated rollouts from the attention, and the student would not see its own tokens at
        # their turns.  So if lessons or process scores read the turns, exclude them only from the policy loss.
        self._masks_truncated = self.reads_turns and self.mask_truncated_completions
        if self._masks_truncated:
            self.mask_truncated_completions = False
        self._open_channels(pairs, other)

    # setting up the channels

    def _open_channels(self, pairs: Sequence[DPOPair] | str | Path | None, other: nn.Module | None) -> None:
        channels = self.channels
        self._splice = HintSplicer(self._render_ids) if channels.sdpo.is_used else None
        self._teacher = self._new_teacher(other) if channels.sdpo.is_used else None
        self._replay: ReplayPairs | None = None
        if channels.sdpo.is_used and channels.sdpo.context == "hint" and not self._has_agent:
            _refuse_without_errors(self.alpha_sdpo, len(self.tools), self.max_tool_calling_iterations)
        if channels.sdpo.may_collapse:
            warnings.warn(
                f"alpha_sdpo = {self.alpha_sdpo}, live teacher: the policy collapses (measured: reward .94 to 0). Set "
                'it to .1 or less, or sdpo_teacher = "round".',
                stacklevel=3,
            )
        if pairs is not None and not channels.replay.is_used:
            raise InnerError("pairs with beta_replay = 0 would teach nothing. Set beta_replay, or leave pairs out.")
        if channels.replay.is_used:
            if pairs is None:
                raise InnerError(f"beta_replay = {self.beta_replay} has no pairs to learn from. Pass pairs.")
            self._replay = self._read_pairs(pairs)

    def _new_teacher(self, other: nn.Module | None) -> DistillationTeacher:
        student = self.accelerator.unwrap_model(self.model)
        other = other.to(self.accelerator.device) if other is not None else None
        return DistillationTeacher(self.channels.sdpo.teacher, student, self.channels.sdpo.ema_rate, other)

    def _read_pairs(self, pairs: Sequence[DPOPair] | str | Path) -> ReplayPairs:
        student: Any = self.accelerator.unwrap_model(self.model)
        limit = getattr(causal_lm(student).config.get_text_config(), "max_position_embeddings", None)
        skip = self.channels.replay.skip_unfit
        replay = ReplayPairs(pairs, self._render_ids, self.processing_class, limit, skip)
        if self.channels.replay.variant == "dpo" and not next(student.parameters()).is_meta:
            with self.accelerator.autocast():
                replay.measure_reference(student, self.channels.replay.batch_size, self.accelerator.device)
        self._pair_at = replay.pair_order(self.share or Share(cast(Any, self.args).seed))
        return replay

    def report_to(self, host: Host) -> None:
        """Report errors in hints and in the process reward to `host`; continue training. An error in a hint costs only
        that hint; after an error in the process reward a batch has no scores."""
        self._forgiving = ForgivingHint(self.hint, host, time.monotonic)
        if self._process is not None:
            self._score_steps = ForgivingProcess(self._process, host, time.monotonic)

    # the lessons

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._tool_call_loop(*args, **kwargs)
        if self.reads_turns:
            self._turns = [read_turns(mask, messages) for mask, messages in zip(out[0], out[1], strict=True)]
        return out

    def _generate(self, prompts: list) -> Any:
        out = super()._generate(prompts)
        if self.reads_turns and self.agents is not None:
            self._turns = [read_turns(mask, messages) for mask, messages in zip(out[2], out[3], strict=True)]
        return out

    def _generate_rollouts(self, inputs: Any) -> Any:
        self._turns = None
        batch = super()._generate_rollouts(inputs)
        if not self.reads_turns:
            return batch
        turns = self._turns or [[] for _ in inputs]
        rollouts = _rollouts_of(inputs, batch, turns, self._rewards, self._completions)
        rollouts = [replace(rollout, tools=self._tools_for(rollout.row)) for rollout in rollouts]
        if self._process is not None and self._mode() == "train":
            batch["advantages"] = self._process_advantages(self._process, rollouts, batch)
        lessons = self._make_lessons(rollouts) if self.channels.sdpo.is_used else None
        if self._masks_truncated:
            batch |= self._without_truncated(batch)
        if lessons is None:
            return batch
        batch[LESSONS] = lessons
        errors = sum(turn.error is not None for rollout in turns for turn in rollout)
        self._record_metric("sdpo/error_turns", errors / len(inputs))
        self._record_metric("sdpo/coverage", sum(bool(rollout) for rollout in lessons) / len(inputs))
        return batch

    def _without_truncated(self, batch: Any) -> dict[str, Tensor]:
        """Return the masks of TRL's mask_truncated_completions for the policy loss; the attention mask is unchanged."""
        tokenizer: Any = self._tokenizer
        ends = torch.tensor([*self.eos_token_ids, tokenizer.pad_token_id], device=batch["completion_ids"].device)
        at_end = (batch["completion_mask"].sum(1, keepdim=True) - 1).clamp(min=0)  # the last token that is not padding
        whole = torch.isin(batch["completion_ids"].gather(1, at_end)[:, 0], ends)
        counted = batch.get("tool_mask", torch.ones_like(batch["completion_mask"])) * whole[:, None]
        total = self.accelerator.gather((batch["completion_mask"] * counted).sum())
        return {"tool_mask": counted, "num_items_in_batch": cast(Tensor, total).sum()}

    # the process reward

    def _process_advantages(self, process: ProcessReward, rollouts: list[Rollout], batch: Any) -> Tensor:
        whole = [replace(r, turns=r.turns or [Turn(0, len(r.ids))]) for r in rollouts]  # no tools: one turn
        assert self._score_steps is not None
        steps = self._score_steps(whole)
        self._record_metric("process/score", fmean(step.score for step in steps) if steps else 0.0)
        self._record_metric("process/coverage", len({step.row for step in steps}) / len(rollouts))
        return process_advantages(
            batch["advantages"], steps, group=cast(int, self.num_generations), width=batch["completion_ids"].size(1),
            process=process, scale=self.scale_rewards,
        )  # fmt: skip

    def _make_lessons(self, rollouts: list[Rollout]) -> list[list[Lesson]]:
        assert self._splice is not None
        if self.channels.sdpo.context == "hint":
            hint = self.hint if self._forgiving is None else self._forgiving
            return hint_lessons(rollouts, hint, self._hint_context, self._splice)
        tokenizer: Any = self.processing_class
        decode = partial(tokenizer.decode, skip_special_tokens=True)
        return rollout_lessons(rollouts, self._group_size(), self.channels.sdpo.success, decode, self._splice)

    def _hint_context(self, row: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
        """Return the first argument of a hint: the prompt's columns and the facts about the failed turn."""
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        messages = [*prompt, *turn.seen.get("state_messages", ())]
        return {**row, "tools": self._tools_for(row), **turn.seen, "state_messages": messages}

    def _tools_for(self, row: Mapping[str, Any]) -> list[Any]:
        if self.agents is not None:
            return self.agents.tools
        tools: dict[str | None, list[Any]] = getattr(self, "_env_tools", None) or {None: self._schemas}
        return tools.get(row.get("environment"), tools.get(None, []))

    # the loss

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        alpha, beta = self._channel_weights(inputs)
        if self.channels.sdpo.teacher == "ema":  # update it in each step, even without a lesson
            self._advance_teacher()
        if not alpha and not beta:
            grpo = self._policy_loss(model, inputs)
            sdpo = None
            replay = None
        else:
            with self._caught_states(model) as caught:
                grpo = self._policy_loss(model, inputs)
            self._record_metric("grpo/coverage", _informed(inputs["advantages"]))
            with self.accelerator.autocast():
                sdpo = self._sdpo_loss(caught, inputs) if alpha else None
                replay = self._replay_loss() if beta else None
        weight = self.channels.policy_weight
        divisor = self._loss_divisor()
        total = grpo if weight == 1 else weight * grpo
        for factor, term in ((alpha, sdpo), (beta, replay)):
            total = total if term is None else total + factor * term / divisor
        self._note_losses(grpo, total, alpha, beta)
        for name, term in (("loss/sdpo_kl", sdpo), ("loss/trace_replay_dpo", replay)):
            if term is not None:
                self._record_metric(name, term.item())
        return total

    def _channel_weights(self, inputs: Any) -> tuple[float, float]:
        """Return α and β for this micro-batch. In evaluation β is 0, because pairs are training data."""
        if not (self.alpha_sdpo or self.beta_replay or self.channels.weight_steps):
            return 0.0, 0.0
        step = self._committed_step()
        channels = self.channels
        alpha = linear_ramp(self.alpha_sdpo, channels.sdpo.weight_end, step, channels.weight_steps)
        beta = linear_ramp(self.beta_replay, channels.replay.weight_end, step, channels.weight_steps)
        if self._mode() == "eval":
            return alpha if LESSONS in inputs else 0.0, 0.0
        if (alpha and LESSONS not in inputs) or (beta and self._replay is None):
            raise InnerError(
                f"alpha_sdpo = {alpha} and beta_replay = {beta} were set on a trainer that was built without one of "
                "them, so there is nothing to learn from. Pass them when it is built."
            )
        return alpha, beta

    @contextmanager
    def _caught_states(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """Catch the backbone's output with its graph, in place of logits, which TRL's fused LM head never builds."""
        caught: list[Tensor] = []

        def catch(module: Any, arguments: Any, output: Any) -> Any:
            caught.append(output.last_hidden_state)
            output.last_hidden_state = self._tap_states("grpo", output.last_hidden_state)
            return output

        hook = causal_lm(self.accelerator.unwrap_model(model)).base_model.register_forward_hook(catch)
        try:
            yield caught
        finally:
            hook.remove()

    def _tap_states(self, channel: str, states: Tensor) -> Tensor:
        divisor = self._loss_divisor()
        return tap_gradient_norm(states, lambda norm: self._record_metric(f"{channel}/grad_norm", norm * divisor))

    def _sdpo_loss(self, caught: list[Tensor], inputs: Any) -> Tensor:
        prompt_width = inputs["prompt_ids"].size(1)
        width = inputs["completion_ids"].size(1)
        rollouts = len(inputs[LESSONS])
        if len(caught) != 1 or caught[0].shape[:2] != (rollouts, prompt_width + width):
            raise RuntimeError(
                f"expected one backbone forward over {(rollouts, prompt_width + width)} tokens in TRL's loss, saw "
                f"{[tuple(h.shape[:2]) for h in caught]}. This TRL version is not supported; use trl 1.16."
            )
        flat = [(row, lesson) for row, lessons in enumerate(inputs[LESSONS]) for lesson in lessons]
        self._record_metric("sdpo/batch_coverage", sum(bool(lessons) for lessons in inputs[LESSONS]) / rollouts)
        if not flat:
            return zero_on_graph(caught[0])
        # The state at token i - 1 predicts token i.
        turns = [(row, prompt_width + lesson.start - 1, lesson.end - lesson.start) for row, lesson in flat]
        student = logits_at(self.accelerator.unwrap_model(self.model), self._tap_states("sdpo", caught[0]), turns)
        teacher = self._teacher_logits([lesson for _, lesson in flat], caught[0].device)
        if self.channels.sdpo.context == "hint":
            taid_t = self.channels.taid_t_at(self._committed_step())
            return distillation_loss(student, teacher, self.channels, taid_t) / rollouts
        ids, written, old = _response_tensors(flat, inputs)
        return self_distillation_loss(
            student, teacher, ids_N=ids, written_N=written, old_N=old, settings=self.channels,
            tokens=self._tokens_to_learn(inputs), sampling_temperature=self.temperature,
        )  # fmt: skip

    def _tokens_to_learn(self, inputs: Any) -> float:
        """Return the divisor of the "rollout" loss: written tokens per micro-batch, a mean over the inner step. So each
        token counts the same for any split into micro-batches. If a step spans several generations, take the mean over
        one generation, because the next generation does not exist yet (TRL's "dapo" does the same)."""
        batches: Any = self._buffered_inputs
        if self._mode() == "eval" or batches is None:
            return written_tokens(inputs)
        served = len(batches) * self.num_iterations
        here = step_in_generation(self._step, self._loss_divisor(), len(batches), served)
        return sum(written_tokens(batches[i]) for i in here) / len(here)

    def _teacher_logits(self, lessons: list[Lesson], device: torch.device) -> Tensor:
        """Return logits (N, V) of the turns' tokens in the teacher's context. It is this term's one extra forward."""
        self._advance_teacher()
        assert self._teacher is not None
        rows = [lesson.teacher_ids for lesson in lessons]
        lengths = [lesson.end - lesson.start for lesson in lessons]
        turns = [(i, len(row) - n - 1, n) for i, (row, n) in enumerate(zip(rows, lengths, strict=True))]
        return self._teacher.logits(rows, turns, device)

    def _advance_teacher(self) -> None:
        assert self._teacher is not None
        inner = self._step // cast(Any, self.args).gradient_accumulation_steps
        self._teacher.advance(self._committed_step(), inner, self._theta)

    def _replay_loss(self) -> Tensor:
        """Return the preference loss of this micro-batch's pairs."""
        replay = self._replay
        size = self.channels.replay.batch_size
        assert replay is not None
        due = [self._pair_at(self._step * size + i) for i in range(size)]
        pairs = [replay.pairs[i] for i in due]
        device = self.accelerator.device
        student = self.accelerator.unwrap_model(self.model)
        sums, lengths = pair_logprobs(student, pairs, device, partial(self._tap_states, "replay"))
        weights = torch.tensor([pair.weight for pair in pairs], dtype=sums.dtype, device=sums.device)
        reference = None if replay.reference_N_2 is None else replay.reference_N_2[due].to(device)
        loss, metrics = preference_loss(sums, lengths, reference, weights, self.channels)
        for name, value in {**metrics, "coverage": (weights > 0).float().mean().item()}.items():
            self._record_metric(f"replay/{name}", value)
        return loss


def _refuse_without_errors(alpha: float, tools: int, turns: int) -> None:
    if not (tools and turns):
        raise InnerError(
            f"alpha_sdpo = {alpha} learns from tool errors, and this trainer can never see one (tools: "
            f"{tools}, max_tool_calling_iterations: {turns}). Pass tools or "
            'an environment_factory with a public method, sdpo_context = "rollout", or alpha_sdpo = 0.'
        )


def _informed(advantages: Tensor) -> float:
    """Return the share of rollouts with a nonzero advantage.   advantages: (B,) or (B, T)."""
    return (advantages.flatten(1) if advantages.dim() > 1 else advantages[:, None]).ne(0).any(1).float().mean().item()


def _rollouts_of(
    rows: Any, batch: Any, turns: list[list[Turn]], rewards: list[float], completions: Any
) -> list[Rollout]:
    assert len(rows) == len(turns) == len(rewards) == len(completions) == len(batch["completion_ids"])
    lengths = batch["completion_mask"].sum(1).tolist()  # of whole completions (_masks_truncated)
    written = batch.get("tool_mask", batch["completion_mask"])
    return [
        Rollout(
            row=row,
            prompt=batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
            ids=batch["completion_ids"][i, : lengths[i]].tolist(),
            written=tuple(written[i, : lengths[i]].tolist()),
            turns=turns[i],
            reward=rewards[i],
            completion=completions[i],
        )
        for i, row in enumerate(rows)
    ]


def written_tokens(batch: Any) -> int:
    """Return the number of tokens in a micro-batch's lessons that the model itself wrote."""
    return sum(sum(lesson.written) for lessons in batch[LESSONS] for lesson in lessons)


def _response_tensors(flat: list[tuple[int, Lesson]], inputs: Any) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return sampled ids, a mask of the model's own tokens, and old log-probs (None: equal to the new); (N,) each."""
    completions = inputs["completion_ids"]
    old = inputs.get("old_per_token_logps")
    ids = torch.cat([completions[row, lesson.start : lesson.end] for row, lesson in flat])
    written = torch.cat([torch.tensor(lesson.written, device=ids.device) for _, lesson in flat])
    if old is not None:
        old = torch.cat([old[row, lesson.start : lesson.end] for row, lesson in flat])
    return ids, written, old
