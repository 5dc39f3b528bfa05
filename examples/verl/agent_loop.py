"""An agent loop for verl: one tool call, its reward, and a hint if the tool's name was wrong.

    op3 4 5 ──▶ <call> t3_9 a 4 b 5 </call>     reward 0, and the hint "use t3_6" for composer_sync's teacher
    op3 4 5 ──▶ <call> t3_6 a 4 b 5 </call>     reward 1, no hint

verl's own loop samples.  The hinted sequence has the hint after the question, and then the same response, so it
contains each response token. Your own loop replaces `hint_of` and `reward_of`.

Not promised: tools that answer; verl's tool_agent loop calls them.
"""

from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput  # pyright: ignore[reportMissingImports]
from verl.experimental.agent_loop.single_turn_agent_loop import (  # pyright: ignore[reportMissingImports]
    SingleTurnAgentLoop,
)

from inner import ToolWorld
from inner.extras.verl.trainer import composer_fields

WORLD = ToolWorld(kinds=6, names=32)


def right_name(messages: list[dict[str, Any]]) -> str:
    """Return the name of the tool that exists for a question such as "op3 4 5"."""
    return WORLD.right_name(int(messages[0]["content"].split()[0].removeprefix("op")))


def reward_of(messages: list[dict[str, Any]], response: str) -> float:
    return float(response.split()[:1] == [right_name(messages)])


def hint_of(messages: list[dict[str, Any]]) -> dict[str, str]:
    return {"role": "system", "content": f"hint use {right_name(messages)}"}


class HintedCall(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        output = await super().run(sampling_params, **kwargs)
        messages = list(kwargs["raw_prompt"])
        response = self.tokenizer.decode(output.response_ids, skip_special_tokens=True)
        output.reward_score = reward_of(messages, response)
        output.extra_fields["reward_extra_info"] = {}
        if not output.reward_score:
            before = await self.ct_build_initial_tokens([*messages, hint_of(messages)])
            output.extra_fields["composer"] = composer_fields(
                response_length=len(output.response_ids),
                hinted_ids=[*before, *output.response_ids],
                at=[len(before) + t for t in range(len(output.response_ids))],
            )
        return output
