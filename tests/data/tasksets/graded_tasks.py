"""A taskset package of verifiers for the tests: every kind of reward that a reply alone can have."""

import asyncio
from collections.abc import Mapping

import verifiers.v1 as vf
from pydantic import Field

__all__ = ["GradedTaskset"]


class GradedData(vf.TaskData):
    word: str


class GradedTask(vf.Task[GradedData]):
    @vf.stop
    async def single_turn(self, trace: vf.Trace) -> bool:
        return trace.num_turns >= 1

    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        await asyncio.sleep(0)
        return float(trace.last_reply == self.data.word[::-1])

    @vf.reward(weight=-0.125)
    async def wordy(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or "") / 7)

    @vf.reward(weight=0.0)
    async def logged_alone(self, trace: vf.Trace) -> float:
        return 100.0

    @vf.reward(weight=0.5)
    async def parts(self, trace: vf.Trace) -> Mapping[str, float]:
        reply = trace.last_reply or ""
        return {"starts": float(reply[:1] == self.data.word[-1]), "empty": float(trace.last_reply == "")}

    @vf.reward(weight=0.01)
    async def messages(self, trace: vf.Trace) -> float:
        return float(sum(len(str(m.content)) for m in trace.messages))

    @vf.reward(weight=0.1)
    async def number(self, trace: vf.Trace) -> float:
        if trace.last_reply == "boom":
            raise ValueError("no number in it")
        return float(trace.num_turns)

    @vf.metric
    async def letters(self, trace: vf.Trace) -> float:
        return 1000.0


class GradedConfig(vf.TasksetConfig):
    words: list[str] = Field(default_factory=lambda: ["abc"])  # a tuple is not read from a command line
    system: str = "Reverse."


class GradedTaskset(vf.Taskset[GradedTask, GradedConfig]):
    def load(self):
        for idx, word in enumerate(self.config.words):
            data = GradedData(idx=idx, prompt=f"{idx}: {word}", word=word, system_prompt=self.config.system or None)
            yield GradedTask(data, self.config.task)
