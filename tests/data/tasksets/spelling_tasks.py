"""A taskset package of verifiers for the tests: spell a word backwards."""

import verifiers.v1 as vf

__all__ = ["SpellingTaskset"]
WORDS = [f"{a}{b}ed" for a in ("blow", "calm", "dent", "form") for b in ("", "s", "er", "ing", "ly")]


class SpellingData(vf.TaskData):
    word: str


class SpellingTask(vf.Task[SpellingData]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.word[::-1])

    @vf.reward(weight=0.25)
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) == len(self.data.word))

    @vf.metric
    async def shared(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 0.0


class SpellingConfig(vf.TasksetConfig):
    first: int = 0
    system: str = ""


class SpellingTaskset(vf.Taskset[SpellingTask, SpellingConfig]):
    def load(self):
        for word in WORDS[self.config.first :]:
            data = SpellingData(
                prompt=f"Spell {word!r} backwards.", word=word, system_prompt=self.config.system or None
            )
            yield SpellingTask(data, self.config.task)
