"""Modal's sandboxes in the test server: create, list, tags, terminate, and the router that runs commands.

    client ── SandboxCreateV2, …ListV2, …TerminateV2, …GetCommandRouterAccess ──▶ ModalServer
    client ── TaskExecStart, …StdinWrite, …StdioRead, …Wait ──▶ Router, a server of its own ──▶ LocalBoxes in namespaces

Commands of another user than root run as root here: the namespaces have no other user; `users` has what was asked for.
dead: ids whose router answers NOT_FOUND.
"""

import asyncio
import itertools
import os
import subprocess
from pathlib import Path
from typing import Any

import grpclib.server
from grpclib import GRPCError, Status
from modal_proto import api_pb2, task_command_router_pb2
from modal_proto.task_command_router_grpc import TaskCommandRouterBase

from inner.extras.boxes.box import USER, BoxOwner, BoxRecipe
from inner.extras.boxes.local import LocalBox, LocalBoxes
from tests.support.planted_boxes import namespaces


class Sandboxes:
    """The part of ModalServer that has sandboxes."""

    folder: Path
    images: dict[str, api_pb2.Image]
    mounts: dict[str, list[api_pb2.MountFile]]

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, tuple[LocalBox, api_pb2.SandboxInfo]] = {}
        self.dead, self.users = set[str](), list[str]()
        self.blocked = list[bool]()  # whether each sandbox was created without a network
        self._router_url, self._count = "", itertools.count(1)

    async def SandboxCreateV2(self, r: Any, who: str) -> Any:
        if any(info.name == r.definition.name for _, info in self.boxes.values()):
            raise GRPCError(Status.ALREADY_EXISTS, f"a sandbox named {r.definition.name} is running")
        n = next(self._count)
        self.blocked.append(r.definition.network_access.network_access_type == api_pb2.NetworkAccess.BLOCKED)
        local = LocalBoxes(self.folder / "boxes", wrap=namespaces)
        folder = {tag.tag_name: tag.tag_value for tag in r.tags}["folder"]  # paths outside of it are lost
        box = local.start(BoxOwner("modal", "0", 0, str(n)), BoxRecipe(folder=folder), timeout_s=1)
        self._fill(self.folder / "boxes" / box._home.name / "root", r.definition.image_id)
        info = api_pb2.SandboxInfo(
            id=f"sb-{n:022d}V", created_at=n, app_id=r.app_id, tags=r.tags, name=r.definition.name,
            timeout_secs=r.definition.timeout_secs, task_info=api_pb2.TaskInfo(id=f"ta-{n:022d}V"),
        )  # fmt: skip
        self.boxes[info.id] = (box, info)
        return api_pb2.SandboxCreateV2Response(
            sandbox_id=info.id, task_id=info.task_info.id, command_router_access=await self._access()
        )

    def _fill(self, root: Path, image_id: str) -> None:
        """Take the COPY and RUN steps of an image and of its base images in a box, as a builder would."""
        image, work = self.images[image_id], "/"
        for base in image.base_images:
            self._fill(root, base.image_id)
        lines = "\n".join(image.dockerfile_commands).replace("\\\n", " ").splitlines()
        for first, _, rest in (line.strip().partition(" ") for line in lines):
            if first == "WORKDIR":
                work = os.path.join(work, rest)
            elif first == "COPY" and image.context_mount_id:
                source, target = rest.split()
                context = {f.filename.lstrip("/"): f for f in self.mounts[image.context_mount_id]}
                path = root / os.path.join(work, target).lstrip("/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes((self.folder / "files" / context[source].sha256_hex).read_bytes())
                path.chmod(context[source].mode)
            elif first == "RUN":
                subprocess.run([*namespaces(root, ""), "bash", "-c", f"cd {work}; {rest}"], check=True)

    def SandboxListV2(self, r: Any, who: str) -> Any:
        asked = {(tag.tag_name, tag.tag_value) for tag in r.tags}
        found = [
            info
            for _, info in self.boxes.values()
            if asked <= {(tag.tag_name, tag.tag_value) for tag in info.tags}
            and (not r.before_timestamp or info.created_at < r.before_timestamp)
        ]
        return api_pb2.SandboxListResponse(sandboxes=sorted(found, key=lambda info: -info.created_at)[:2])

    def SandboxTagsGetV2(self, r: Any, who: str) -> Any:
        return api_pb2.SandboxTagsGetResponse(tags=self._info(r.sandbox_id).tags)

    def SandboxGetTaskIdV2(self, r: Any, who: str) -> Any:
        return api_pb2.SandboxGetTaskIdResponse(task_id=self._info(r.sandbox_id).task_info.id)

    def SandboxTerminateV2(self, r: Any, who: str) -> Any:
        if found := self.boxes.pop(r.sandbox_id, None):
            found[0].stop()
        return api_pb2.SandboxTerminateResponse()

    async def SandboxGetCommandRouterAccess(self, r: Any, who: str) -> Any:
        self._info(r.sandbox_id)
        access = await self._access()
        return api_pb2.SandboxGetCommandRouterAccessResponse(url=access.url, jwt=access.jwt)

    def _info(self, id: str) -> Any:
        if id not in self.boxes:
            raise GRPCError(Status.NOT_FOUND, f"no sandbox {id}")
        return self.boxes[id][1]

    async def _access(self) -> Any:
        if not self._router_url:
            router = grpclib.server.Server([Router(self)])  # type: ignore[abstract,list-item]
            await router.start("127.0.0.1", 0)
            self._router_url = f"http://127.0.0.1:{router._server.sockets[0].getsockname()[1]}"  # type: ignore
            self._router = router
        return api_pb2.CommandRouterAccess(url=self._router_url, jwt="e30.e30.e30")


def _rpc(name: str) -> Any:
    async def answer(self: Any, stream: Any) -> None:
        handler = getattr(self, f"on_{name}", None)
        if handler is None:
            raise GRPCError(Status.UNIMPLEMENTED, f"{name} is not in the test router")
        await stream.send_message(await handler(await stream.recv_message()))

    return answer


class Router(
    type("Methods", (TaskCommandRouterBase,), {n: _rpc(n) for n in TaskCommandRouterBase.__abstractmethods__})  # type: ignore[misc]
):
    """Runs the commands of all sandboxes; their output is sent when they have ended."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._running: dict[str, Any] = {}
        self._said: dict[str, asyncio.Future[bytes]] = {}

    async def on_TaskExecStart(self, r: Any) -> Any:
        id = f"sb-{r.task_id.removeprefix('ta-')}"
        if id in self._sandboxes.dead or id not in self._sandboxes.boxes:
            raise GRPCError(Status.NOT_FOUND, "the task is gone")
        root = self._sandboxes.folder / "boxes" / self._sandboxes.boxes[id][0]._home.name / "root"
        words, as_user = list(r.command_args), list(USER)
        self._sandboxes.users.append("1000" if words[: len(as_user)] == as_user else "root")
        words = words[len(as_user) :] if words[: len(as_user)] == as_user else words
        self._running[r.exec_id] = ran = await asyncio.create_subprocess_exec(
            *namespaces(root, ""), *words, stdin=-1, stdout=-1, stderr=asyncio.subprocess.DEVNULL
        )
        self._said[r.exec_id] = asyncio.ensure_future(ran.stdout.read())  # type: ignore[union-attr]
        return task_command_router_pb2.TaskExecStartResponse()

    async def on_TaskExecStdinWrite(self, r: Any) -> Any:
        stdin = self._running[r.exec_id].stdin
        try:
            stdin.write(r.data)
            await stdin.drain()
            if r.eof:
                stdin.close()
        except (ConnectionError, RuntimeError):
            pass  # the command has ended, or does not read
        return task_command_router_pb2.TaskExecStdinWriteResponse()

    async def on_TaskExecWait(self, r: Any) -> Any:
        return task_command_router_pb2.TaskExecWaitResponse(code=await self._running[r.exec_id].wait())

    async def TaskExecStdioRead(self, stream: Any) -> None:
        r = await stream.recv_message()
        is_out = r.file_descriptor == task_command_router_pb2.TASK_EXEC_STDIO_FILE_DESCRIPTOR_STDOUT
        said = await self._said[r.exec_id] if is_out else b""
        for at in range(r.offset, len(said), 1 << 20):
            await stream.send_message(task_command_router_pb2.TaskExecStdioReadResponse(data=said[at : at + (1 << 20)]))
