"""Play tasks of verifiers (verifiers.v1) with the model: tools of a server, `setup`, `finalize`, rewards in a runtime.

    row ── task, entry ──▶ the taskset's environment, one per process ──▶ run_episode ──▶ Σ weight · reward
                                └ runtime: a folder and processes of this machine
    chat   the loop of verifiers' `null` harness, as a task of this process: ask, call tools, until a reply has no call

A task whose rewards need only the reply does not need this module (inner/tasks/tasksets.py).

Not promised: containers, several agents, harnesses of a taskset's own (`plan` refuses them by name).
"""

import asyncio
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from verifiers.v1.clients import ModelContext  # pyright: ignore[reportMissingImports]
from verifiers.v1.configs.client import EvalClientConfig  # pyright: ignore[reportMissingImports]
from verifiers.v1.dialects.chat import message_to_wire  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.null import NullHarness  # pyright: ignore[reportMissingImports]
from verifiers.v1.harnesses.utils.launch import CHAT_PROGRAM_SOURCE  # pyright: ignore[reportMissingImports]
from verifiers.v1.runtimes import ProgramResult  # pyright: ignore[reportMissingImports]

from inner.tasks.spec import TaskSpec
from inner.tasks.tasksets import config_of, has_own_harness, seat_of, task_class_of

HARNESS = "serverless_diloco_chat"  # the id by which verifiers finds the harness below
CLIENTS_S = 60.0  # seconds in which a tool server must answer first
PROGRAM: Any = ModuleType(HARNESS)  # the null harness's program; its functions find each other in this module
exec(compile(CHAT_PROGRAM_SOURCE, HARNESS, "exec", dont_inherit=True), vars(PROGRAM))


class EpisodeLost(ConnectionError):
    """An episode that verifiers could not finish: it has no reward."""


class ChatHarness(NullHarness):
    """verifiers' `null` harness without a process of its own for each rollout."""

    async def setup(self, runtime: Any) -> None: ...

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)
        first = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or ())
        messages = [*([{"role": "system", "content": system}] if system else []), *first]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        asked = {"tool_interception_url": tool_interception_url or "", "api_key": secret}
        args = SimpleNamespace(**asked, bash=False, edit=False, search=False)
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(
                PROGRAM.AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None)
            )
            gate = await stack.enter_async_context(PROGRAM.httpx.AsyncClient(timeout=None))
            connecting = PROGRAM.connect_mcp({"mcpServers": servers}, stack, set())
            tools, dispatch, connected = await asyncio.wait_for(connecting, CLIENTS_S)
            loop = PROGRAM.Compactor(client, ctx.model, tools, False, None)
            await PROGRAM.run_chat_loop(args, loop, messages, dispatch, connected, gate)
        return ProgramResult(exit_code=0, stdout="", stderr="")


class Open:
    """A taskset's environment, whose servers run until this process ends."""

    def __init__(self, spec: TaskSpec) -> None:
        self._config, self._task_class = config_of(spec), task_class_of(spec)
        environment, config_class, seat = seat_of(spec)
        harness = spec.name if has_own_harness(spec) else HARNESS
        player = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
        self._env: Any = environment(config_class.model_validate({"taskset": self._config, seat: player}))
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._serve())

    @property
    def has_ended(self) -> bool:
        """Whether its servers have ended, or could not start."""
        return self._serving.done()

    async def play(self, entry: str, model: Any) -> dict[str, float]:
        """Return the reward of each run of the agent in an episode, by the session of its requests.

        Raises EpisodeLost."""
        await asyncio.shield(self._ready)
        task = self._task_class(self._task_class.data_type().model_validate_json(entry), self._config.task)
        client = EvalClientConfig(base_url=model.base_url, api_key_var="SERVERLESS_DILOCO_NO_KEY")
        episode = await self._env.run_episode(task, ModelContext(model=model.name, client=client))
        faults = [*episode.errors, *(error for trace in episode.traces for error in trace.errors if not trace.ok)]
        if not episode.ok:
            said = f"{faults[-1].type}: {' '.join(faults[-1].message.split())[:200]}" if faults else "without an error"
            raise EpisodeLost(f"verifiers could not finish the episode ({said})")
        return {trace.id: trace.reward for trace in episode.traces}

    async def _serve(self) -> None:
        try:
            async with self._env.serving():
                self._ready.set_result(None)
                await asyncio.Future()  # until this process ends
        except Exception as error:
            if not self._ready.done():
                self._ready.set_exception(error)


def taskset_agent() -> Callable[..., Any]:
    """Return an agent that plays the rows of verifiers' tasksets."""
    PROGRAM.ChatHarness, PROGRAM.__all__ = ChatHarness, ["ChatHarness"]
    sys.modules[HARNESS] = PROGRAM
    opened = dict[str, Open]()

    async def solve(row: dict[str, Any], model: Any) -> dict[str, float]:
        if row["task"] not in opened or opened[row["task"]].has_ended:
            opened[row["task"]] = Open(TaskSpec.from_json(row["task"]))
        return await opened[row["task"]].play(row["entry"], model)

    return solve
