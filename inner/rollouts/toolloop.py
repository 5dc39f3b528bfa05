"""Runs TRL's tool loop without its repeated work, and with a callback for each generation.

    per step of 64 rollouts            as shipped      here
    JSON schemas of the tools          per prompt      once
    the tokens after a tool result     per call        once per result
    a prompt's tokens                  per rollout     once per group
    the template that reads turns      twice per turn  once per generation

The results are the same, bit for bit. `on_rollouts` gets every generation with its rewards.

Not promised: a gain without tools, or if all tool results differ; images.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.utils.chat_template_utils import get_json_schema
from trl.trainer.grpo_trainer import GRPOTrainer

from inner.data.rendering import prompt_ids, text_of, whole
from inner.errors import InnerError

if TYPE_CHECKING:
    from inner.rollouts.recording.bundle import Bundle
try:
    from transformers.utils.chat_parsing.response_templates import load_response_template
except ImportError:  # another version of TRL: use its own parsing
    load_response_template = None

CACHED = 4096  # the limit of cache entries, because the number of different tool results is unlimited

Turn = Callable[[bool], AbstractContextManager[None]]  # enters the environment's state (True) or the model's (apart.py)
# (prompts, completions, rewards, each rollout's environment name)
OnRollouts = Callable[[Sequence[Any], Sequence[Any], Sequence[float], Sequence[str | None] | None], None]


class LeanToolLoop(GRPOTrainer):
    """GRPOTrainer with caches. Call `_cache_schemas` after construction."""

    on_rollouts: OnRollouts | None = None
    lanes: Any = None  # environments' threads and limits (at_once/lanes.py); None: all runs in the training thread
    turn: Turn = staticmethod(lambda theirs: nullcontext())
    agents: Any = None  # makes the rollouts, if the user has an agent (inner/extras/agents/rollouts.py)
    replayed: "Bundle | None" = None  # the recorded rollouts on which this generation trains (recorded.py)

    def _cache_schemas(self) -> None:
        self._suffixes: dict[tuple[tuple[str, str], ...], list[int]] = {}
        by_environment: dict[str, list[Any]] | None = getattr(self, "_env_tools", None)
        if by_environment:  # TRL accepts dict schemas in place of callables
            self._env_tools = {name: [get_json_schema(f) for f in methods] for name, methods in by_environment.items()}
        self._schemas = [] if by_environment else [t if isinstance(t, dict) else get_json_schema(t) for t in self.tools]

    def tool_schemas(self) -> dict[str, list[Any]]:
        """Return environment name -> tool schemas; the name is "" if there is at most one environment."""
        by_environment: dict[str | None, list[Any]] = getattr(self, "_env_tools", None) or {None: self._schemas}
        return {name or "": schemas for name, schemas in by_environment.items() if schemas}

    def _get_tool_suffix_ids(self, tool_messages: list[dict[str, Any]]) -> list[int]:
        shown = [{**m, "name": whole(str(m["name"])), "content": _shown(m["content"])} for m in tool_messages]
        key = tuple((m["name"], m["content"]) for m in shown)
        if key not in self._suffixes:
            if len(self._suffixes) >= CACHED:
                self._suffixes.clear()
            self._suffixes[key] = super()._get_tool_suffix_ids(shown)
        return list(self._suffixes[key])

    def _tool_call_loop(self, *args: Any, **kwargs: Any) -> Any:
        if self.replayed is not None:
            return self.replayed.turns
        if self.lanes is not None or self.turn is not LeanToolLoop.turn:
            from inner.rollouts.at_once.tools import prepare_tools

            prepare_tools(self, completions=args[3])
        return super()._tool_call_loop(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        if self.agents is not None:
            self.agents.rows = inputs
        with self.turn(True), self._environments_at_once("reset", inputs):
            return super()._generate_and_score_completions(inputs)

    def _environments_at_once(self, method: str, rows: Any = None) -> AbstractContextManager[None]:
        if self.environment_factories is None or self.lanes is None or self.replayed is not None:
            return nullcontext()
        from inner.rollouts.at_once.environments import environments_at_once

        return environments_at_once(self, method, rows)

    def _tokenize_prompts(self, prompts: list) -> Any:
        """Render equal prompts of the same environment only once."""
        if self.replayed is not None:
            return self.replayed.prompt_ids, None, {}
        environments = getattr(self, "_batch_environments", None) or [None] * len(prompts)
        rendered: dict[str, list[int]] = {}
        keys = [f"{name}\n{json.dumps(prompt, default=id)}" for name, prompt in zip(environments, prompts, strict=True)]
        for key, name, prompt in zip(keys, environments, prompts, strict=True):
            if key not in rendered:
                rendered[key] = self._prompt_ids(prompt, name)
        return [list(rendered[key]) for key in keys], None, {}

    def _prompt_ids(self, prompt: Any, environment: str | None = None) -> list[int]:
        return prompt_ids(self.processing_class, prompt, tools=self._tools_of(environment), **self._template_options())

    def _tools_of(self, environment: str | None) -> list[Any]:
        by_environment: dict[str | None, list[Any]] = getattr(self, "_env_tools", None) or {}
        return by_environment.get(environment, self._schemas)

    def _template_options(self) -> dict[str, Any]:
        return {"chat_template": self.chat_template, **cast(Any, self.chat_template_kwargs)}

    def _generate(self, prompts: list) -> Any:
        """Load the tokenizer's response template once. TRL would convert its dict for every turn that it parses."""
        if self.agents is not None:
            return self.agents.generate(super()._generate, prompts)
        tokenizer: Any = self._tokenizer
        template = getattr(tokenizer, "response_template", None)
        if not isinstance(template, dict) or load_response_template is None:
            return super()._generate(prompts)
        tokenizer.response_template = load_response_template(template)
        try:
            return super()._generate(prompts)
        finally:
            tokenizer.response_template = template

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        with self.turn(False), self.turn(True), self._environments_at_once("get_reward"):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.environment_factories is not None and self.lanes is not None and self.replayed is None:
            from inner.rollouts.at_once.environments import forget_hung

            forget_hung(self, rewards, len(prompts))
        rewards = self._settle_rewards(rewards)
        if self.on_rollouts is not None and cast(Any, self.model).training:
            first = self.accelerator.process_index * len(prompts)  # rewards are those of all processes
            totals = total_rewards(rewards[first : first + len(prompts)], self.reward_weights)
            names: Any = self._batch_environments if getattr(self, "_multi_environment", False) else None
            self.on_rollouts(self.agents.prompts if self.agents else prompts, completions, totals.tolist(), names)
        return rewards

    def _settle_rewards(self, rewards_B_F: Tensor) -> Tensor:
        """Return the rewards that count. A subclass may change them."""
        return rewards_B_F


def _shown(content: Any) -> str:
    """Return a tool's result as the template gets it: text, the text of its parts, or str()."""
    try:
        return str(text_of(content))
    except InnerError:
        return str(content)


def total_rewards(rewards_B_F: Tensor, weights_F: Tensor) -> Tensor:
    """Return Σ of weight · reward over the functions, without NaN terms; NaN if all are NaN."""
    totals = (rewards_B_F * weights_F.to(rewards_B_F)).nansum(dim=1)
    return totals.masked_fill(rewards_B_F.isnan().all(dim=1), torch.nan)
