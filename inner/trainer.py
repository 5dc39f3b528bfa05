"""GRPO with hint distillation at tool errors, as one subclass of TRL's GRPOTrainer.

    total = grpo + α · sdpo           each added term / gradient accumulation steps, as TRL's own loss already is

    rollout   prompt │ turn 0: <call> t3_9 … │ {'error': …} │ turn 1 …
                     └────────┬──────────────┘
    teacher   prompt + hint │ turn 0           one forward, no gradient
    student   GRPO's own forward: its backbone output is caught by a hook, so there is no second student forward
    sdpo      Σ over the tokens of all hinted turns of JSD(student ‖ teacher) / rollouts in the batch

It is Composer's shape (a hint at the failing turn, added to RL) with OPSD's kernel; it is not the SDPO paper's method,
which scores whole responses again and replaces the policy gradient.

α = 0 adds nothing: TRL's loss and gradients, bit for bit, and no forward beyond TRL's.

Not promised: more than one process per model, vision models, or that α carries over to another `sdpo_jsd_beta`.
"""

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers.utils.chat_template_utils import get_json_schema
from trl.rewards.other_rewards import get_soft_overlong_punishment
from trl.trainer.grpo_trainer import GRPOTrainer

from inner.base import TEACHERS, InnerError
from inner.dynamic import refill
from inner.hints import Hint, templates
from inner.losses.divergence import generalized_jsd_loss, zero_on_graph
from inner.objectives import check_settings
from inner.order import prompt_order
from inner.spans import HintSplicer, Lesson, Turn, read_turns

# In TRL's batches: one list of lessons per rollout, so that its shuffle and split keep them aligned.
LESSONS = "sdpo_lessons"
REFILLS = 2**64  # keeps the order of dynamic sampling's prompts apart from every data seed's
CACHED = 4096  # entries per cache; tool results may be endless


class ComposerReplicationTrainer(GRPOTrainer):
    """GRPOTrainer plus:

    objective         the name in the menu that `args` must hold (make_po_config makes such); None: whatever args say
    alpha_sdpo        weight of the hint distillation; 0 is plain GRPO
    hint              (row, error) -> text or None; default: templates over the error and the tools (inner.hints)
    sdpo_jsd_beta     0 forward KL · .5 JSD · 1 reverse KL
    sdpo_temperature  softmax temperature of the divergence
    sdpo_token_clip   cap per vocabulary entry (OPSD)
    sdpo_teacher      "live": the model itself · "frozen": a copy of the model as it came in
    data_seed, start  data order as a pure function of (data_seed, inner step), from inner step `start` on;
                      without data_seed: TRL's own sampler
    """

    def __init__(
        self,
        *args: Any,
        objective: str | None = None,
        alpha_sdpo: float = 0.0,
        beta_replay: float = 0.0,
        sdpo_jsd_beta: float = 0.5,
        sdpo_temperature: float = 1.0,
        sdpo_token_clip: float | None = None,
        sdpo_teacher: str = "live",
        hint: Hint | None = None,
        data_seed: int | None = None,
        start: int = 0,
        **kwargs: Any,
    ) -> None:
        _refuse(alpha_sdpo, beta_replay, sdpo_teacher)
        model = kwargs.get("model", args[0] if args else None)
        teacher = _frozen_copy(model) if alpha_sdpo and sdpo_teacher == "frozen" else None
        super().__init__(*args, **kwargs)
        self._apply_objective(objective)
        self.alpha_sdpo, self.hint = alpha_sdpo, hint or templates
        self.sdpo_jsd_beta, self.sdpo_temperature = sdpo_jsd_beta, sdpo_temperature
        self.sdpo_token_clip, self.sdpo_teacher = sdpo_token_clip, sdpo_teacher
        self._teacher = teacher.to(self.accelerator.device) if teacher is not None else None
        self._turns: list[list[Turn]] | None = None
        self._start_at(data_seed, start)
        self._cache_schemas()
        self._splice = HintSplicer(self._render) if alpha_sdpo else None
        if alpha_sdpo and not (self.tools and self.max_tool_calling_iterations):
            raise InnerError(
                f"alpha_sdpo = {alpha_sdpo} learns at tool errors, and this trainer can never see one (tools: "
                f"{len(self.tools)}, max_tool_calling_iterations: {self.max_tool_calling_iterations}). Pass tools or "
                "an environment_factory with a public method, or set alpha_sdpo = 0."
            )

    # the objective: what TRL's loss does not do by itself

    def _apply_objective(self, objective: str | None) -> None:
        arguments: Any = self.args
        if objective is not None:
            check_settings(objective, vars(arguments))
        self.dynamic_sampling: int = getattr(arguments, "dynamic_sampling", 0)
        self._refills = 0
        if tokens := getattr(arguments, "soft_overlong_tokens", 0):
            self._add_reward(get_soft_overlong_punishment(arguments.max_completion_length, tokens))

    def _add_reward(self, reward: Any) -> None:
        self.reward_funcs = [*self.reward_funcs, reward]
        self.reward_func_names.append(reward.__name__)
        self.reward_processing_classes = [*self.reward_processing_classes, None]
        self.reward_weights = torch.cat([self.reward_weights, self.reward_weights.new_ones(1)])

    def _policy_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        if self.loss_type == "gmpo":  # TRL has it as a trainer of its own, which differs in this method only
            from trl.experimental.gmpo.gmpo_trainer import GMPOTrainer

            return GMPOTrainer._compute_loss(cast(Any, self), model, inputs)
        return super()._compute_loss(model, inputs)

    def _more_rollouts(self, groups: int) -> dict[str, Any]:
        """Rollouts of the next `groups` prompts, in an order of their own."""
        dataset: Any = self.train_dataset
        arguments: Any = self.args
        at = prompt_order(len(dataset), REFILLS + (self.data_seed or 0))
        rows = [dataset[at(self._refills + i)] for i in range(groups) for _ in range(arguments.num_generations)]
        self._refills += groups
        return self._rollouts(rows)

    # the data order

    def _start_at(self, data_seed: int | None, start: int) -> None:
        self.data_seed = data_seed
        # TRL's micro-batch counter decides when to generate anew; set, it puts a second life in phase with the first.
        self._step = start * self.args.gradient_accumulation_steps

    def _get_train_sampler(self, dataset: Any = None) -> Sampler:
        if self.data_seed is None:
            return super()._get_train_sampler(dataset)
        rows: Any = self.train_dataset if dataset is None else dataset
        return _GenerationSampler(self, len(rows), self.data_seed)

    # two caches: without them 40 % of a step goes into building the same JSON schemas and suffixes again

    def _cache_schemas(self) -> None:
        self._suffixes: dict[tuple[tuple[str, str], ...], list[int]] = {}
        by_environment: dict[str, list[Any]] | None = getattr(self, "_env_tools", None)
        if by_environment:  # dict schemas are accepted where callables are
            self._env_tools = {name: [get_json_schema(f) for f in methods] for name, methods in by_environment.items()}
        self._schemas = [] if by_environment else [t if isinstance(t, dict) else get_json_schema(t) for t in self.tools]

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        if not all(isinstance(m["content"], str) for m in tool_messages):  # images: not ours to cache
            return super()._get_tool_suffix_ids(tool_messages)
        key = tuple((m["name"], m["content"]) for m in tool_messages)
        if key not in self._suffixes:
            if len(self._suffixes) >= CACHED:
                self._suffixes.clear()
            self._suffixes[key] = super()._get_tool_suffix_ids(tool_messages)
        return list(self._suffixes[key])

    # 1. see the error turns

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        out = super()._tool_call_loop(*args, **kwargs)
        if self.alpha_sdpo:
            self._turns = [read_turns(mask, messages) for mask, messages in zip(out[0], out[1], strict=True)]
        return out

    # 2. attach the lessons to the batch

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        batch = self._rollouts(inputs)
        if not self.dynamic_sampling or self._mode() == "eval":
            return batch
        group: int = cast(Any, self.args).num_generations
        batch, informative, more = refill(batch, self._more_rollouts, group, self.dynamic_sampling)
        self._note("dynamic/informative", informative * group / len(inputs))
        self._note("dynamic/generations", more)
        return batch

    def _rollouts(self, inputs: Any) -> Any:
        self._turns = None
        batch = super()._generate_and_score_completions(inputs)
        if not self.alpha_sdpo:
            return batch
        turns = self._turns or [[] for _ in inputs]
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(batch["prompt_ids"], batch["prompt_mask"], strict=True)
        ]
        completions = batch["completion_ids"].tolist()
        if prepare := getattr(self.hint, "prepare", None):  # a hint that asks somebody asks for all at once
            failed = [(row, turn) for row, found in zip(inputs, turns, strict=True) for turn in found if turn.error]
            prepare([(self._told(row, turn), turn.error) for row, turn in failed])
        lessons = [self._lessons(*each) for each in zip(inputs, turns, prompts, completions, strict=True)]
        batch[LESSONS] = lessons
        errors = sum(turn.error is not None for rollout in turns for turn in rollout)
        self._note("sdpo/error_turns", errors / len(inputs))
        self._note("sdpo/coverage", sum(bool(rollout) for rollout in lessons) / len(inputs))
        return batch

    def _lessons(self, row: Mapping[str, Any], turns: list[Turn], prompt: list[int], ids: list[int]) -> list[Lesson]:
        """One lesson per failed turn that has a hint."""
        lessons = []
        for turn in turns:
            hint = self.hint(self._told(row, turn), turn.error) if turn.error is not None else None
            if hint is not None:
                self._splice = self._splice or HintSplicer(self._render)
                teacher_ids = self._splice(prompt + ids[: turn.start], hint, ids[turn.start : turn.end])
                lessons.append(Lesson(turn.start, turn.end, teacher_ids))
        return lessons

    def _told(self, row: Mapping[str, Any], turn: Turn) -> dict[str, Any]:
        """What a hint gets to see: the prompt's columns and what is known of the failed turn."""
        tools: dict[str | None, list[Any]] = getattr(self, "_env_tools", None) or {None: self._schemas}
        prompt = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        messages = [*prompt, *turn.seen.get("state_messages", ())]
        schemas = tools.get(row.get("environment"), tools.get(None, []))
        return {**row, "tools": schemas, **turn.seen, "state_messages": messages}

    # 3. the loss

    def _compute_loss(self, model: nn.Module, inputs: Any) -> Tensor:
        if not self.alpha_sdpo or LESSONS not in inputs:
            loss = self._policy_loss(model, inputs)
            self._note_losses(loss, None, loss)
            return loss
        with self._caught_states(model) as caught:
            grpo = self._policy_loss(model, inputs)
        sdpo = self._sdpo_loss(caught, inputs)
        total = grpo + self.alpha_sdpo * sdpo / self._loss_divisor()
        self._note_losses(grpo, sdpo, total)
        return total

    def _loss_divisor(self) -> int:
        """TRL divides its own loss by this in train mode, and Trainer does not divide again."""
        return self.current_gradient_accumulation_steps if self._mode() == "train" else 1

    @contextmanager
    def _caught_states(self, model: nn.Module) -> Iterator[list[Tensor]]:
        """TRL's fused LM head never builds logits; the backbone's output, with its graph, is all we need."""
        caught: list[Tensor] = []
        hook = _causal_lm(self.accelerator.unwrap_model(model)).base_model.register_forward_hook(
            lambda module, arguments, output: caught.append(output.last_hidden_state)
        )
        try:
            yield caught
        finally:
            hook.remove()

    def _sdpo_loss(self, caught: list[Tensor], inputs: Any) -> Tensor:
        prompt_width, width = inputs["prompt_ids"].size(1), inputs["completion_ids"].size(1)
        rollouts = len(inputs[LESSONS])
        if len(caught) != 1 or caught[0].shape[:2] != (rollouts, prompt_width + width):
            raise RuntimeError(
                f"expected one backbone forward over {(rollouts, prompt_width + width)} tokens in TRL's loss, saw "
                f"{[tuple(h.shape[:2]) for h in caught]}. This TRL version is not supported; use trl 1.16."
            )
        states_B_T_D = caught[0]
        flat = [(row, lesson) for row, lessons in enumerate(inputs[LESSONS]) for lesson in lessons]
        if not flat:
            return zero_on_graph(states_B_T_D)
        # The state at token i - 1 predicts token i.
        turns = [(row, prompt_width + lesson.start - 1, lesson.end - lesson.start) for row, lesson in flat]
        student = _head(self.accelerator.unwrap_model(self.model))(_pick(states_B_T_D, turns))
        divergence = generalized_jsd_loss(
            student,
            self._teacher_logits([lesson for _, lesson in flat], states_B_T_D.device),
            beta=self.sdpo_jsd_beta,
            temperature=self.sdpo_temperature,
            reduction="sum",
            token_clip=self.sdpo_token_clip,
        )
        return divergence / rollouts

    @torch.no_grad()
    def _teacher_logits(self, lessons: list[Lesson], device: torch.device) -> Tensor:
        """Logits of the turns' tokens under the hinted context: the one extra forward. Rows padded on the left."""
        width = max(len(lesson.teacher_ids) for lesson in lessons)
        ids_N_W = torch.zeros((len(lessons), width), dtype=torch.long)
        mask_N_W = torch.zeros_like(ids_N_W)
        for row, lesson in enumerate(lessons):
            n = len(lesson.teacher_ids)
            ids_N_W[row, width - n :] = torch.tensor(lesson.teacher_ids)
            mask_N_W[row, width - n :] = 1
        teacher = self._teacher if self._teacher is not None else self.accelerator.unwrap_model(self.model)
        states = _causal_lm(teacher).base_model(
            input_ids=ids_N_W.to(device), attention_mask=mask_N_W.to(device), use_cache=False
        )
        lengths = [lesson.end - lesson.start for lesson in lessons]
        turns = [(row, width - n - 1, n) for row, n in enumerate(lengths)]
        return _head(teacher)(_pick(states.last_hidden_state, turns))

    # numbers and templates

    def _note(self, name: str, value: float) -> None:
        # Append only: self.log() inside the loss would clear everybody's metrics.
        self._metrics[self._mode()][name].append(float(value))

    def _mode(self) -> str:
        model: Any = self.model
        return "train" if model.training else "eval"

    def _note_losses(self, grpo: Tensor, sdpo: Tensor | None, total: Tensor) -> None:
        divisor = self._loss_divisor()  # undone here, so that the mean over micro-batches is the step's loss
        self._note("loss/grpo", grpo.item() * divisor)
        self._note("loss/total", total.item() * divisor)
        self._note("loss/alpha_sdpo", self.alpha_sdpo)
        if sdpo is not None:
            self._note("loss/sdpo_kl", sdpo.item())

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        norm: Any = super()._get_grad_norm(model, grad_norm=grad_norm)
        self._note("grad_norm", float(norm))
        return norm

    def _render(self, messages: list[dict[str, Any]], opened: bool) -> list[int]:
        tokenizer: Any = self.processing_class
        options: Any = self.chat_template_kwargs
        return tokenizer.apply_chat_template(
            messages,
            tokenize=True,
            return_dict=False,
            add_generation_prompt=opened,
            chat_template=self.chat_template,
            **options,
        )


class _GenerationSampler(Sampler):
    """Prompt indices from the trainer's current micro-batch on: generation g = micro-batch // micro-batches per
    generation.

    A generation's prompts are yielded once per micro-batch that it serves; TRL uses the first and reads the others from
    its buffer. Endless, since an inner loop has no last step."""

    def __init__(self, trainer: ComposerReplicationTrainer, n_prompts: int, seed: int) -> None:
        self.trainer, self.at = trainer, prompt_order(n_prompts, seed)

    def __iter__(self) -> Iterator[int]:
        args: Any = self.trainer.args
        repeats = args.num_generations
        per_generation = args.generation_batch_size // repeats
        served = args.steps_per_generation * self.trainer.num_iterations
        for micro in itertools.count(self.trainer._step):
            first = micro // served * per_generation
            for position in range(first, first + per_generation):
                yield from itertools.repeat(self.at(position), repeats)

    def __len__(self) -> int:
        return 2**40


def _refuse(alpha_sdpo: float, beta_replay: float, sdpo_teacher: str) -> None:
    if alpha_sdpo < 0:
        raise InnerError(f"alpha_sdpo = {alpha_sdpo} must be 0 (off) or more.")
    if beta_replay:
        raise InnerError(
            f"beta_replay = {beta_replay}: replay is not in this version of the trainer. Set beta_replay = 0."
        )
    if sdpo_teacher not in TEACHERS:
        raise InnerError(f"sdpo_teacher = {sdpo_teacher!r} is not known. One of: {', '.join(TEACHERS)}.")


def _frozen_copy(model: object) -> nn.Module:
    """Before TRL patches the model's forward."""
    if not isinstance(model, nn.Module):
        raise InnerError('sdpo_teacher = "frozen" copies the model: pass the loaded model, not its name.')
    return copy.deepcopy(model).eval().requires_grad_(False)


def _causal_lm(model: Any) -> Any:
    """The transformers model inside a PEFT one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _head(model: Any) -> nn.Module:
    return _causal_lm(model).get_output_embeddings()


def _pick(states_B_T_D: Tensor, turns: list[tuple[int, int, int]]) -> Tensor:
    """States of n positions from `first` on, for each (row, first, n), one behind the other -> (N, D)."""
    rows = [row for row, _, n in turns for _ in range(n)]
    positions = [i for _, first, n in turns for i in range(first, first + n)]
    device = states_B_T_D.device
    return states_B_T_D[torch.tensor(rows, device=device), torch.tensor(positions, device=device)]
