"""Find contradictions between optional settings, which a plain run does not use: loop = "supervised", rewards, dropout,
sdpo, process, vllm, boxes.

Not promised: contradictions inside one table, except [inner.rewards]; the table's class finds them.  No torch here.
"""

from collections.abc import Callable, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from inner.errors import InnerError
from inner.settings.channels import WHOLE_SEQUENCE_LOSSES
from inner.tasks.spec import HARBOR

if TYPE_CHECKING:
    from inner.settings.inner import InnerConfig

UNCORRECTED = ("gmpo",)  # losses for which TRL has no importance correction for another sampler


def check_options(config: "InnerConfig") -> None:
    """Raise InnerError if settings of these options contradict other settings."""
    if config.loop == "supervised":
        _check_supervised(config)
        return
    _check_agent(config)
    _check_vllm(config)
    _check_process(config)
    _check_sdpo(config)
    _check_boxes(config)
    _check_dropout(config)
    _check_weights(config)


def _check_weights(config: "InnerConfig") -> None:
    """Refuse rewards that all have the weight 0, unless an environment or a box's task gives the reward."""
    functions, sampling = config.rewards.functions, config.sampling
    if functions and not (any(functions.values()) or sampling.environment or sampling.boxes):
        raise InnerError("[inner.rewards.functions] gives every reward the weight 0. Give at least one another weight.")


def _check_dropout(config: "InnerConfig") -> None:
    """Refuse dropout in a loss with π_old, which has no dropout: the ratio r would be noise, mostly clipped."""
    dropout, disabled = config.lora.dropout if config.lora else 0.0, config.trl.get("disable_dropout")
    if dropout and disabled:
        raise InnerError(
            f"inner.trl.disable_dropout = true switches inner.lora.dropout = {dropout} off. Leave out one of them."
        )
    served, corrects = config.generation_steps, config.vllm is not None and config.vllm.corrects
    if (dropout or disabled is False) and (config.gradient_accumulation_steps % served or corrects):
        name = f"inner.lora.dropout = {dropout}" if dropout else "inner.trl.disable_dropout = false"
        why = "[inner.vllm] corrects its rollouts" if corrects else f"a generation serves {served} micro-batches"
        mend = "let a generation serve one inner step (inner.grpo.steps_per_generation, num_iterations)"
        mend = 'set inner.vllm.importance_mode = "off"' if corrects else mend
        raise InnerError(
            f"{name}: {why}, so the loss compares the policy with dropout to the policy that sampled, without dropout. "
            f"Dropout alone would put most ratios outside of the clip range. Leave it out, or {mend}."
        )


def _check_supervised(config: "InnerConfig") -> None:
    if config.data.text is None:
        raise InnerError(
            'inner.loop = "supervised" has no text to learn from. Set inner.data.text to a .txt, .npy or .bin file.'
        )
    if config.model == "toolworld":
        raise InnerError(
            'inner.model = "toolworld" only knows its own 200 words. For inner.loop = "supervised" set '
            'inner.model = "tiny" (bytes), a local folder or a Hub id.'
        )
    if config.vllm is not None:
        raise InnerError(
            '[inner.vllm] generates rollouts, and inner.loop = "supervised" makes no rollouts. Leave it out, or set '
            'inner.loop = "grpo".'
        )
    if config.sdpo.is_used or config.replay.is_used:
        raise InnerError(
            f"inner.sdpo.weight = {config.sdpo.weight} and inner.replay.weight = {config.replay.weight} are terms "
            'beside a policy loss, and inner.loop = "supervised" has no rollouts. Set inner.loop = "grpo", or '
            "set both weights to 0."
        )
    if config.process is not None:
        raise InnerError(
            '[inner.process] scores rollouts\' turns, and inner.loop = "supervised" makes no rollouts. Leave the table '
            'out, or set inner.loop = "grpo".'
        )


def _check_vllm(config: "InnerConfig") -> None:
    if config.vllm is None:
        return
    if config.lora is not None and config.lora.base is not None:
        raise InnerError(
            f'inner.lora.base = "{config.lora.base}" with [inner.vllm]: an engine on a base of its own precision would '
            "sample from another policy than the one that is trained. Leave one of the two out."
        )
    mode, loss = config.vllm.importance_mode, config.objective_settings.get("loss_type")
    if loss in UNCORRECTED and config.vllm.corrects:
        raise InnerError(
            f'inner.vllm.importance_mode = "{mode}": the loss "{loss}" takes no importance weights, so the correction '
            'would do nothing. Set inner.vllm.importance_mode = "off".'
        )
    if loss == "vespo" and mode.startswith("sequence"):
        raise InnerError(
            f'inner.vllm.importance_mode = "{mode}": the loss "vespo" weighs sequences itself and takes only '
            'weights of tokens. Set inner.vllm.importance_mode = "token_truncate".'
        )


def _check_process(config: "InnerConfig") -> None:
    if config.process is None:
        return
    if config.objective_settings.get("loss_type") in WHOLE_SEQUENCE_LOSSES:
        raise InnerError(
            f"[inner.process] needs an advantage per turn, and the formula of inner.grpo.objective = "
            f'"{config.grpo.objective}" has one advantage per rollout. Choose another objective, or leave '
            "[inner.process] out."
        )
    if config.grpo.weight == 0:
        raise InnerError(
            "[inner.process] moves the policy gradient, which inner.grpo.weight = 0 leaves out. Set "
            "inner.grpo.weight above 0, or leave [inner.process] out."
        )


def _check_sdpo(config: "InnerConfig") -> None:
    if not config.sdpo.is_used:
        return
    sampling = config.sampling
    has_tools = bool(sampling.environment or sampling.boxes or sampling.agent) or config.model == "toolworld"
    iterations = config.sampling.max_tool_calling_iterations
    if config.sdpo.context == "hint" and (not has_tools or iterations == 0):
        raise InnerError(
            f"inner.sdpo.weight = {config.sdpo.weight} learns from tool errors, and this run can never report one "
            f"(inner.sampling.environment = {config.sampling.environment}, max_tool_calling_iterations = "
            f'{iterations}). Set inner.sampling.environment, inner.sdpo.context = "rollout", or inner.sdpo.weight '
            "= 0."
        )
    if config.sdpo.may_collapse:
        raise InnerError(
            f"inner.sdpo.weight = {config.sdpo.weight}, live teacher: the policy collapses (measured: reward .94 to 0)."
            ' Set inner.sdpo.weight to .1 or less, or inner.sdpo.teacher = "round" or "frozen".'
        )


def _check_boxes(config: "InnerConfig") -> None:
    task, boxes = config.data.task, config.sampling.boxes
    is_harbor = task is not None and task.startswith(f"{HARBOR}:")
    if is_harbor and boxes is None:
        raise InnerError(f'inner.data.task = {task!r} runs in boxes. Set, e.g., inner.sampling.boxes = "local".')
    if boxes is not None and config.sampling.environment is None and not (is_harbor or config.data.prompts):
        raise InnerError(
            f'inner.sampling.boxes = {boxes!r} has no Harbor tasks to run. Set inner.data.task = "harbor:FOLDER", or '
            "leave inner.sampling.boxes out."
        )


def _check_agent(config: "InnerConfig") -> None:
    sampling = config.sampling
    if (agent := sampling.agent) is None:
        return
    others = {
        "inner.sampling.environment": sampling.environment, "inner.sampling.boxes": sampling.boxes,
        'inner.model = "toolworld"': config.model == "toolworld",
    }  # fmt: skip
    if used := [name for name, value in others.items() if value]:
        raise InnerError(
            f"inner.sampling.agent = {agent!r} with {used[0]}: an agent has tools of its own, and its turns belong to "
            "no environment of the run. Leave one of the two out."
        )


# -------------------------------------------------------------------- [inner.rewards]


def check_rewards(function: str | None, functions: Mapping[str, Any], name_of: Callable[[str], str]) -> None:
    """Raise InnerError for a value that names no reward, or for weights without effect.   name_of: task.reward_name."""
    if function is not None and function.startswith("hub:"):
        raise InnerError(
            f"inner.rewards.function = {function!r} is a reward model. Write it as a line of "
            f'[inner.rewards.functions]: "{function}" = 1.0.'
        )
    if function is not None and functions:
        raise InnerError(
            f"inner.rewards.function = {function!r} and [inner.rewards.functions] are both set. Move the "
            f'function into that table as a line of its own: "{function}" = 1.0.'
        )
    for spelling in functions:
        _check_line(functions, spelling, name_of)


def _check_line(functions: Mapping[str, Any], spelling: str, name_of: Callable[[str], str]) -> None:
    weight = functions[spelling]
    name = f"inner.rewards.functions: {spelling!r} = {weight!r}"
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not isfinite(weight):
        raise InnerError(f'{name} has no weight. Write "file.py:function" = 1.0, or another finite number.')
    if not spelling.startswith("hub:") and not all(spelling.rpartition(":")):
        raise InnerError(f'{name} names no function. Write "file.py:function" = {weight}.')
    same = [other for other in functions if name_of(other) == name_of(spelling)]  # name_of refuses a wrong hub: name
    if len(same) > 1:
        raise InnerError(
            f"inner.rewards.functions: {' and '.join(map(repr, same))} have the same name, under which each is "
            "logged. Rename one of the functions."
        )
