"""Modal on loopback, for the real client (modal 1.6) and the real container runtime.

    client ──gRPC──▶ ModalServer ── per call: `python -P -m modal._container_entrypoint`, a process of its own ──gRPC──┐
                          ▲──────────────────────────────────────────────────────────────────────────────────────────┘
    app deploy, lookup, stop · image builds · mounts as they were uploaded · secrets · dicts · blobs · calls · logs

    with ModalPlatform() as platform:      faults: preempt (SIGINT, grace, SIGKILL, same input again), kill, crash loop,
        platform.executor() …              time-out, lost reply, UNAVAILABLE, dropped logs, hold, refused inputs

A container has the environment that Modal gives it, and no more: its packages are those that its image installs
(tests/support/modal_venv.py: this project is not among them), its files come from the mounts, its credentials from the
secrets.  It may not deploy: what a container asks for that builds apps is in `deploys`, and fails the test.
A crashed container of a deployed app starts again for ever, as the real ones do.

Not promised: how the live service words its messages, its seconds of grace, and which side wins its races.
"""

import asyncio
import hashlib
import inspect
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpclib.server
from aiohttp import web
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2
from modal_proto.api_grpc import ModalClientBase

from executors.platforms.base import Handle, ReplicaSpec
from executors.platforms.on_modal.executor import ModalExecutor
from tests.support.modal_boxes import Sandboxes
from tests.support.modal_venv import packages_of, stub_driver, venv_of
from tests.support.modal_volumes import Volumes
from tests.support.turnstile import Turnstile

ROOT = Path(__file__).parents[2]
WHO = "x-container"  # the header by which a container says which one it is
GRACE_S = 15.0
HEARTBEAT_S = 0.5
EPHEMERAL_CRASHES = 3
FETCH_LIMIT = 20_000
OK = api_pb2.GenericResult.GENERIC_STATUS_SUCCESS
FAILURE = api_pb2.GenericResult.GENERIC_STATUS_FAILURE
TERMINATED = api_pb2.GenericResult.GENERIC_STATUS_TERMINATED
TIMED_OUT = api_pb2.GenericResult.GENERIC_STATUS_TIMEOUT
INTERNAL = api_pb2.GenericResult.GENERIC_STATUS_INTERNAL_FAILURE
DEPLOYS = ("AppCreate", "AppPublish", "AppDeploy", "AppGetOrCreate", "FunctionCreate", "FunctionPrecreate",
           "ImageGetOrCreate", "MountGetOrCreate", "MountPutFile")  # fmt: skip
GONE = (api_pb2.APP_STATE_STOPPED, api_pb2.APP_STATE_DISABLED)


@dataclass
class App:
    id: str
    name: str
    state: int
    tags: dict[str, str]
    functions: dict[str, str] = field(default_factory=dict)
    versions: int = 0


@dataclass
class Function:
    id: str
    app: App
    name: str
    metadata: api_pb2.FunctionHandleMetadata
    ranked: list[api_pb2.Function] = field(default_factory=list)

    @property
    def definition(self) -> api_pb2.Function:
        return self.ranked[0]

    @property
    def gpus(self) -> list[str]:
        return [f.resources.gpu_config.gpu_type for f in self.ranked]


@dataclass
class Container:
    id: str
    call: "Call"
    process: asyncio.subprocess.Process
    cancel: asyncio.Event
    delivered: bool = False

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Kill all processes in it, as the end of a container does."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)


@dataclass
class Call:
    """One input.   lost: its host is gone and it is not started again."""

    id: str
    function: Function
    input: api_pb2.FunctionInput
    input_id: str
    created: float
    done: asyncio.Event
    result: api_pb2.GenericResult | None = None
    format: int = 0
    container: Container | None = None
    starts: int = 0
    cancelled: bool = False
    lost: bool = False

    def end(self, status: int, text: str = "") -> None:
        if self.result is None:
            self.result = api_pb2.GenericResult(status=status, exception=text)  # type: ignore[arg-type]
            self.done.set()


@dataclass
class Line:
    at_ns: int
    data: str
    app_id: str
    task_id: str
    call_id: str


def _heeds_sigint() -> None:
    """A shell's background job ignores SIGINT, and so would what it starts; Modal's containers do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _refuse(status: Status, text: str) -> GRPCError:
    return GRPCError(status, text)


def _rpc(name: str) -> Callable[..., Any]:
    async def answer(self: Any, stream: Any) -> None:
        await self.server.serve(name, stream)

    return answer


class Service(
    type("Methods", (ModalClientBase,), {n: _rpc(n) for n in ModalClientBase.__abstractmethods__})  # type: ignore[misc]
):
    """Every method of the protocol: those that the server has, the rest is UNIMPLEMENTED."""

    def __init__(self, server: "ModalServer") -> None:
        self.server = server


class Objects:
    """Apps, images, mounts, secrets, dicts, blobs."""

    folder: Path
    url: str

    def __init__(self) -> None:
        self.apps: dict[str, App] = {}
        self.functions: dict[str, Function] = {}
        self.images: dict[str, api_pb2.Image] = {}
        self.mounts: dict[str, list[api_pb2.MountFile]] = {}
        self.secrets: dict[str, tuple[str, dict[str, str]]] = {}  # id -> name, values
        self.dicts: dict[str, tuple[str, dict[bytes, bytes]]] = {}
        self.blobs: dict[str, bytes] = {}
        self.asked_in: set[str] = set()  # environments in which a client asked for a dict
        self.build_fails: list[str] = []  # its last lines
        self.lines: list[Line] = []
        self._numbers = Counter[str]()

    def _new(self, kind: str) -> str:
        self._numbers[kind] += 1
        return f"{kind}-{self._numbers[kind]:022d}"

    # ------------------------------------------------------------------ the workspace

    def ClientHello(self, _: Any, who: str) -> Any:
        return api_pb2.ClientHelloResponse()

    def AuthTokenGet(self, _: Any, who: str) -> Any:
        return api_pb2.AuthTokenGetResponse(token="e30.e30.e30")

    def EnvironmentGetOrCreate(self, r: Any, who: str) -> Any:
        if r.deployment_name not in ("", "main", "dev"):
            raise _refuse(Status.NOT_FOUND, f"Environment '{r.deployment_name}' not found")
        settings = api_pb2.EnvironmentSettings(image_builder_version="2025.06")
        metadata = api_pb2.EnvironmentMetadata(name="main", settings=settings)
        return api_pb2.EnvironmentGetOrCreateResponse(environment_id="en-1", metadata=metadata)

    def WorkspaceNameLookup(self, _: Any, who: str) -> Any:
        return api_pb2.WorkspaceNameLookupResponse(workspace_name="test", username="test")

    # ------------------------------------------------------------------ apps

    def deployed(self, name: str) -> App | None:
        return next((a for a in self.apps.values() if a.name == name and a.state == api_pb2.APP_STATE_DEPLOYED), None)

    def _app(self, name: str, state: int, tags: dict[str, str]) -> App:
        app = App(self._new("ap"), name, state, tags)
        self.apps[app.id] = app
        return app

    def AppCreate(self, r: Any, who: str) -> Any:
        app = self._app(r.description, r.app_state, dict(r.tags))
        return api_pb2.AppCreateResponse(app_id=app.id, app_page_url=f"{self.url}/{app.id}")

    def AppGetByDeploymentName(self, r: Any, who: str) -> Any:
        app = self.deployed(r.name)
        return api_pb2.AppGetByDeploymentNameResponse(app_id=app.id if app else "")

    def AppGetOrCreate(self, r: Any, who: str) -> Any:
        app = self.deployed(r.app_name)
        if app is None and r.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            raise _refuse(Status.NOT_FOUND, f"App '{r.app_name}' not found in environment 'main'")
        return api_pb2.AppGetOrCreateResponse(
            app_id=(app or self._app(r.app_name, api_pb2.APP_STATE_DEPLOYED, {})).id,
            handle_metadata=api_pb2.AppHandleMetadata(environment_name="main"),
        )

    def AppHeartbeat(self, r: Any, who: str) -> Any:
        return Empty()

    def _layout(self, app: App) -> api_pb2.AppLayout:
        objects = [
            api_pb2.Object(object_id=f.id, function_handle_metadata=f.metadata)
            for f in self.functions.values()
            if f.app is app
        ]
        return api_pb2.AppLayout(objects=objects, function_ids=app.functions)

    def AppGetLayout(self, r: Any, who: str) -> Any:
        return api_pb2.AppGetLayoutResponse(app_layout=self._layout(self.apps[r.app_id]))

    def AppPublish(self, r: Any, who: str) -> Any:
        app = self.apps[r.app_id]
        app.functions, app.versions = dict(r.function_ids), app.versions + 1
        app.state, app.tags = r.app_state or app.state, dict(r.tags) or app.tags
        app.name = r.name or app.name
        return api_pb2.AppPublishResponse(url=f"{self.url}/{app.id}", deployed_at=time.time())

    def AppList(self, r: Any, who: str) -> Any:
        item = api_pb2.AppListResponse.AppListItem
        return api_pb2.AppListResponse(
            apps=[item(app_id=a.id, name=a.name, description=a.name, state=a.state) for a in self.apps.values()]  # type: ignore[arg-type]
        )

    def AppGetTags(self, r: Any, who: str) -> Any:
        return api_pb2.AppGetTagsResponse(tags=self.apps[r.app_id].tags)

    def AppSetTags(self, r: Any, who: str) -> Any:
        self.apps[r.app_id].tags = dict(r.tags)
        return Empty()

    def AppGetLifecycle(self, r: Any, who: str) -> Any:
        lifecycle = api_pb2.AppLifecycle(app_state=self.apps[r.app_id].state)  # type: ignore[arg-type]
        return api_pb2.AppGetLifecycleResponse(lifecycle=lifecycle)

    # ------------------------------------------------------------------ images and files

    def ImageGetOrCreate(self, r: Any, who: str) -> Any:
        known = [id for id, image in self.images.items() if image == r.image]
        id = known[0] if known else self._new("im")
        self.images[id] = r.image
        installs = any("pip install" in c for c in r.image.dockerfile_commands)
        if self.build_fails and installs:
            now = time.time_ns()
            self.lines += [Line(now + i, f"{t}\n", "ap-builder", id, "") for i, t in enumerate(self.build_fails)]
            return api_pb2.ImageGetOrCreateResponse(image_id=id, result=api_pb2.GenericResult(status=FAILURE))
        metadata = api_pb2.ImageMetadata(image_builder_version="2025.06")
        return api_pb2.ImageGetOrCreateResponse(image_id=id, result=api_pb2.GenericResult(status=OK), metadata=metadata)

    def ImageBuildChainGet(self, r: Any, who: str) -> Any:
        step = api_pb2.ImageBuildStep(image_id=r.image_id, builder_app_id="ap-builder", builder_task_id=r.image_id)
        step.started_at.FromSeconds(int(time.time()) - 60)
        step.finished_at.FromSeconds(int(time.time()) + 60)
        return api_pb2.ImageBuildChainGetResponse(build_steps=[step])

    def MountBatchedCheckExistence(self, r: Any, who: str) -> Any:
        missing = [h for h in r.sha256_hex_hashes if not (self.folder / "files" / h).exists()]
        return api_pb2.MountBatchedCheckExistenceResponse(missing_sha256_hex_hashes=missing)

    def MountPutFile(self, r: Any, who: str) -> Any:
        body = self.blobs[r.data_blob_id] if r.data_blob_id else r.data
        (self.folder / "files" / r.sha256_hex).write_bytes(body)
        return api_pb2.MountPutFileResponse(exists=True)

    def MountGetOrCreate(self, r: Any, who: str) -> Any:
        digest = hashlib.sha256(repr(sorted((f.filename, f.sha256_hex) for f in r.files)).encode()).hexdigest()
        id = "mo-client" if r.deployment_name else f"mo-{digest[:22]}"
        self.mounts[id] = list(r.files)
        metadata = api_pb2.MountHandleMetadata(content_checksum_sha256_hex=id)
        return api_pb2.MountGetOrCreateResponse(mount_id=id, handle_metadata=metadata)

    def mounted(self, id: str) -> str:
        """The folder that is /root in a container with this mount."""
        home = self.folder / "mounts" / id
        if not home.exists():
            for f in self.mounts[id]:
                target = home / f.filename.lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                os.link(self.folder / "files" / f.sha256_hex, target)
        return str(home / "root")

    def BlobCreate(self, r: Any, who: str) -> Any:
        id = self._new("bl")
        return api_pb2.BlobCreateResponse(blob_id=id, upload_url=f"{self.blob_url}/{id}")

    def BlobGet(self, r: Any, who: str) -> Any:
        return api_pb2.BlobGetResponse(download_url=f"{self.blob_url}/{r.blob_id}")

    blob_url = ""

    serve_block: Callable[[web.Request], Coroutine[Any, Any, web.Response]]

    async def serve_blob(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if id.startswith("block-"):
            return await self.serve_block(request)
        if request.method == "PUT":
            self.blobs[id] = await request.read()
            return web.Response()
        return web.Response(body=self.blobs[id])

    # ------------------------------------------------------------------ secrets and dicts

    def SecretGetOrCreate(self, r: Any, who: str) -> Any:
        kind = r.object_creation_type
        if not r.deployment_name:
            id = self._new("st")
            self.secrets[id] = ("", dict(r.env_dict))
            return api_pb2.SecretGetOrCreateResponse(secret_id=id)
        found = [id for id, (name, _) in self.secrets.items() if name == r.deployment_name]
        if not found and kind == api_pb2.OBJECT_CREATION_TYPE_UNSPECIFIED:
            raise _refuse(Status.NOT_FOUND, f"Secret '{r.deployment_name}' not found in environment 'main'")
        id = found[0] if found else self._new("st")
        if kind != api_pb2.OBJECT_CREATION_TYPE_UNSPECIFIED:
            self.secrets[id] = (r.deployment_name, dict(r.env_dict))
        metadata = api_pb2.SecretMetadata(name=r.deployment_name, keys=list(self.secrets[id][1]))
        return api_pb2.SecretGetOrCreateResponse(secret_id=id, metadata=metadata)

    def SecretDelete(self, r: Any, who: str) -> Any:
        del self.secrets[r.secret_id]
        return Empty()

    def DictGetOrCreate(self, r: Any, who: str) -> Any:
        self.asked_in.add(r.environment_name)
        found = [id for id, (name, _) in self.dicts.items() if name == r.deployment_name]
        if not found and r.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            raise _refuse(Status.NOT_FOUND, f"Dict '{r.deployment_name}' not found in environment 'main'")
        id = found[0] if found else self._new("di")
        self.dicts.setdefault(id, (r.deployment_name, {}))
        metadata = api_pb2.DictMetadata(name=r.deployment_name)
        return api_pb2.DictGetOrCreateResponse(dict_id=id, metadata=metadata)

    def DictDelete(self, r: Any, who: str) -> Any:
        del self.dicts[r.dict_id]
        return Empty()

    def DictGet(self, r: Any, who: str) -> Any:
        value = self.dicts[r.dict_id][1].get(r.key)
        return api_pb2.DictGetResponse(found=value is not None, value=value)

    def DictContains(self, r: Any, who: str) -> Any:
        return api_pb2.DictContainsResponse(found=r.key in self.dicts[r.dict_id][1])

    def DictUpdate(self, r: Any, who: str) -> Any:
        entries = self.dicts[r.dict_id][1]
        created = not any(u.key in entries for u in r.updates)
        if created or not r.if_not_exists:
            entries.update({u.key: u.value for u in r.updates})
        return api_pb2.DictUpdateResponse(created=created)

    async def DictContents(self, r: Any, who: str) -> AsyncIterator[Any]:
        for key, value in list(self.dicts[r.dict_id][1].items()):
            yield api_pb2.DictEntry(key=key if r.keys else b"", value=value if r.values else b"")


class Logs(Objects):
    drop_logs_after = -1  # so many lines are still served, then a few requests fail
    failing_log_requests = 0

    def _chosen(self, r: Any) -> list[Line]:
        since, until = r.since.ToNanoseconds(), r.until.ToNanoseconds()
        return [
            x
            for x in self.lines
            if x.app_id == r.app_id and since <= x.at_ns < until
            and r.function_call_id in ("", x.call_id) and r.task_id in ("", x.task_id) and r.search_text in x.data
        ]  # fmt: skip

    def _cut(self, served: int) -> None:
        """The connection drops once, for longer than the client tries again by itself."""
        if 0 <= self.drop_logs_after <= served:
            self.drop_logs_after, self.failing_log_requests = -1, 6
        if self.failing_log_requests:
            self.failing_log_requests -= 1
            raise _refuse(Status.UNAVAILABLE, "connection lost")

    def AppCountLogs(self, r: Any, who: str) -> Any:
        found = self._chosen(r)
        self._cut(len(found))
        counts = Counter(x.at_ns // 1_000_000_000 // r.bucket_secs * r.bucket_secs for x in found)
        buckets = [api_pb2.AppCountLogsResponse.LogBucket(stdout_logs=n) for _, n in sorted(counts.items())]
        for bucket, start in zip(buckets, sorted(counts), strict=True):
            bucket.bucket_start_at.FromSeconds(start)
        return api_pb2.AppCountLogsResponse(app_id=r.app_id, buckets=buckets)

    def AppFetchLogs(self, r: Any, who: str) -> Any:
        found = self._chosen(r)
        self._cut(len(found))
        newest = found[-min(r.limit, FETCH_LIMIT) :]
        batches = [self._batch(newest[i : i + 1000]) for i in range(0, len(newest), 1000)]
        return api_pb2.AppFetchLogsResponse(batches=batches)

    def _batch(self, lines: list[Line], entry: str = "") -> api_pb2.TaskLogsBatch:
        items = [
            api_pb2.TaskLogs(
                data=x.data, timestamp_ns=x.at_ns, timestamp=x.at_ns / 1e9, function_call_id=x.call_id,
                file_descriptor=api_pb2.FILE_DESCRIPTOR_STDOUT,
            )
            for x in lines
        ]  # fmt: skip
        return api_pb2.TaskLogsBatch(task_id=lines[0].task_id if lines else "", items=items, entry_id=entry)

    async def AppGetLogs(self, r: Any, who: str) -> AsyncIterator[Any]:
        """The stream, for `modal run` and `modal app logs`."""
        at, until = int(r.last_entry_id or 0), time.monotonic() + r.timeout
        while True:
            for i in range(at, len(self.lines)):
                if self.lines[i].app_id == r.app_id and r.function_call_id in ("", self.lines[i].call_id):
                    yield self._batch([self.lines[i]], str(i + 1))
            at = len(self.lines)
            if self.apps[r.app_id].state in GONE:
                yield api_pb2.TaskLogsBatch(app_done=True)
                return
            if time.monotonic() >= until:
                return
            await asyncio.sleep(0.05)


class ModalServer(Sandboxes, Volumes, Logs):
    """In a thread with a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, Call] = {}
        self.containers: dict[str, Container] = {}
        self.faults: list[tuple[str, str, Status | None]] = []  # method, "refuse" or "lose", status
        self.refused: list[bytes] = []  # inputs with these bytes in them cannot be started
        self.hooks: dict[str, Callable[[], object]] = {}
        self.requests = Counter[str]()
        self.watch: Callable[[str, Any, str], object] = lambda name, request, who: None  # called before each answer
        self.has_gpus = True  # machines with GPUs show them, to processes that look at the driver
        self.deploys: list[str] = []  # what containers asked for, though only a laptop may
        self.token = "ts-secret"
        self.turnstiles: dict[str, tuple[Turnstile, Callable[[Any], bool]]] = {}
        self.folder = Path(tempfile.mkdtemp(prefix="modal-"))
        for name in ("files", "mounts", "args", "home", "venvs"):
            (self.folder / name).mkdir()
        self._thread = threading.Thread(target=self._serve, name="modal-server", daemon=True)
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self.errors: list[BaseException] = []  # of our own

    # ------------------------------------------------------------------ life

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(10)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(20)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self.loop, self._stopping, self.open = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self.open.set()
        self._starting = asyncio.Semaphore(os.cpu_count() or 2)
        rpc = grpclib.server.Server([Service(self)])  # type: ignore[list-item]
        await rpc.start("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{rpc._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        blobs = web.Application(client_max_size=1 << 30)
        blobs.router.add_route("*", "/{id}", self.serve_blob)
        runner = web.AppRunner(blobs)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.blob_url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        self._ready.set()
        await self._stopping.wait()
        for call in self.calls.values():
            self._terminate(call)
        self.open.set()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10)
        rpc.close()
        await runner.cleanup()

    async def serve(self, name: str, stream: Any) -> None:
        request, headers = await stream.recv_message(), stream.metadata
        self.requests[name] += 1
        who = headers.get(WHO, "")
        if who and name in DEPLOYS:
            self.deploys.append(f"{name} by {who}")
        if not who and headers.get("x-modal-token-secret") != self.token:
            raise _refuse(Status.UNAUTHENTICATED, "Token ID is malformed or unknown.")
        await self._gathered(name, request)
        fault = self._fault(name)
        if fault and fault[1] == "refuse":
            raise _refuse(fault[2] or Status.UNAVAILABLE, "injected")
        self.watch(name, request, who)
        handler = getattr(self, name, None)
        if handler is None:
            raise _refuse(Status.UNIMPLEMENTED, f"{name} is not in the test server")
        answer = handler(request, who)
        if inspect.isasyncgen(answer):
            async for part in answer:
                await stream.send_message(part)
            return
        answer = await answer if inspect.isawaitable(answer) else answer
        if hook := self.hooks.pop(name, None):
            hook()
            raise _refuse(Status.UNAVAILABLE, "nobody is there to hear it")
        if fault:
            raise _refuse(Status.UNAVAILABLE, "the answer was lost")
        await stream.send_message(answer)

    def after(self, name: str, hook: Callable[[], object]) -> None:
        """Call it once, when the next request of that name is done and not yet answered."""
        self.hooks[name] = hook

    def gather(self, name: str, together: int, about: Callable[[Any], bool] = lambda request: True) -> Turnstile:
        """Answer requests of that name only once so many are in flight.   about: which of them (default: all)."""
        self.turnstiles[name] = Turnstile(together), about
        return self.turnstiles[name][0]

    async def _gathered(self, name: str, request: Any) -> None:
        turnstile, about = self.turnstiles.get(name, (None, bool))
        if turnstile and about(request):
            with turnstile.request():
                while not turnstile.is_open:
                    await asyncio.sleep(0.01)

    def _fault(self, name: str) -> tuple[str, str, Status | None] | None:
        found = next((f for f in self.faults if f[0] == name), None)
        if found:
            self.faults.remove(found)
        return found

    # ------------------------------------------------------------------ functions and calls

    def FunctionPrecreate(self, r: Any, who: str) -> Any:
        id = r.existing_function_id or self._new("fu")
        metadata = api_pb2.FunctionHandleMetadata(
            function_name=r.function_name, function_type=r.function_type, app_id=r.app_id, definition_id=id,
            supported_input_formats=r.supported_input_formats, supported_output_formats=r.supported_output_formats,
        )  # fmt: skip
        self.functions[id] = Function(id, self.apps[r.app_id], r.function_name, metadata)
        return api_pb2.FunctionPrecreateResponse(function_id=id, handle_metadata=metadata)

    def FunctionCreate(self, r: Any, who: str) -> Any:
        function = self.functions[r.existing_function_id]
        data = r.function_data
        if not data.ranked_functions:
            data.ranked_functions.append(api_pb2.FunctionData.RankedFunction(rank=0, function=r.function))
        function.ranked = [ranked.function for ranked in data.ranked_functions]
        return api_pb2.FunctionCreateResponse(
            function_id=function.id, handle_metadata=function.metadata, function_data=data
        )

    def FunctionGet(self, r: Any, who: str) -> Any:
        app = self.deployed(r.app_name)
        if app is None or r.object_tag not in app.functions:
            raise _refuse(Status.NOT_FOUND, f"Function '{r.object_tag}' not found in app '{r.app_name}'")
        function = self.functions[app.functions[r.object_tag]]
        ranked = [api_pb2.FunctionData.RankedFunction(rank=i, function=f) for i, f in enumerate(function.ranked)]
        return api_pb2.FunctionGetResponse(
            function_id=function.id,
            handle_metadata=function.metadata,
            function=api_pb2.FunctionData(ranked_functions=ranked),
        )

    def FunctionMap(self, r: Any, who: str) -> Any:
        function, sent = self.functions[r.function_id], r.pipelined_inputs[0].input
        if any(mark in sent.args for mark in self.refused):
            raise _refuse(Status.FAILED_PRECONDITION, "this input cannot be started")
        if function.app.state in GONE:
            raise _refuse(Status.FAILED_PRECONDITION, f"App {function.app.id} is stopped")
        call = Call(self._new("fc"), function, sent, self._new("in"), time.time(), asyncio.Event())
        self.calls[call.id] = call
        self._spawn(self._run(call))
        item = api_pb2.FunctionPutInputsResponseItem(idx=0, input_id=call.input_id)
        return api_pb2.FunctionMapResponse(function_call_id=call.id, pipelined_inputs=[item])

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.errors.append(error)

    def _call(self, id: str) -> Call:
        if id not in self.calls:
            raise _refuse(Status.NOT_FOUND, f"Function call {id} not found")
        return self.calls[id]

    async def FunctionGetOutputs(self, r: Any, who: str) -> Any:
        call = self._call(r.function_call_id)
        if call.result is None and r.timeout > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(call.done.wait(), r.timeout)
        if call.result is None:
            return api_pb2.FunctionGetOutputsResponse(num_unfinished_inputs=1)
        item = api_pb2.FunctionGetOutputsItem(result=call.result, data_format=call.format, input_id=call.input_id)  # type: ignore[arg-type]
        return api_pb2.FunctionGetOutputsResponse(outputs=[item])

    def FunctionCallFromId(self, r: Any, who: str) -> Any:
        call = self._call(r.function_call_id)
        metadata = api_pb2.FunctionCallHandleMetadata(app_id=call.function.app.id, function_id=call.function.id)
        return api_pb2.FunctionCallFromIdResponse(function_call_id=call.id, num_inputs=1, metadata=metadata)

    def FunctionCallGetInfo(self, r: Any, who: str) -> Any:
        call = self._call(r.function_call_id)
        info = api_pb2.FunctionCallInfo(function_call_id=call.id, created_at=call.created, total_inputs=1)
        (info.succeeded_inputs if call.result is not None else info.pending_inputs).total = 1
        return api_pb2.FunctionCallGetInfoResponse(info=info)

    def FunctionCallCancel(self, r: Any, who: str) -> Any:
        call = self._call(r.function_call_id)
        call.cancelled = True
        if r.terminate_containers or call.container is None:
            self._terminate(call)
        else:
            call.container.cancel.set()
        return Empty()

    def FunctionGetCurrentStats(self, r: Any, who: str) -> Any:
        open_calls = [c for c in self.calls.values() if c.function.id == r.function_id and c.result is None]
        running = sum(c.container is not None and c.container.delivered for c in open_calls)
        return api_pb2.FunctionStats(backlog=len(open_calls) - running, num_running_inputs=running)

    def _terminate(self, call: Call) -> None:
        call.cancelled = True
        if call.container is not None:
            call.container.kill()
        call.end(TERMINATED)

    def AppStop(self, r: Any, who: str) -> Any:
        app = self.apps[r.app_id]
        app.state = api_pb2.APP_STATE_STOPPED
        for call in self.calls.values():
            if call.function.app is app:
                self._terminate(call)
        return Empty()

    def AppClientDisconnect(self, r: Any, who: str) -> Any:
        app = self.apps[r.app_id]
        mine = [c for c in self.calls.values() if c.function.app is app]
        if app.state == api_pb2.APP_STATE_DETACHED:
            for call in mine[:-1]:  # the client's own warning: only the last one lives on
                self._terminate(call)
        elif app.state in (api_pb2.APP_STATE_EPHEMERAL, api_pb2.APP_STATE_INITIALIZING):
            self.AppStop(r, who)
        return Empty()

    # ------------------------------------------------------------------ containers

    async def _run(self, call: Call) -> None:
        """Containers for one call, one after the other, until it has a result."""
        while call.result is None:
            await self.open.wait()
            async with self._starting:
                if call.result is not None:
                    return
                container = await self._start(call)
            try:
                await container.process.wait()
            finally:
                container.kill()
                call.container = None
            await self._after(call)

    async def _after(self, call: Call) -> None:
        if call.cancelled:
            call.end(TERMINATED)
        elif call.lost:
            call.end(INTERNAL, "The container's host was lost.")
        elif call.function.app.state != api_pb2.APP_STATE_DEPLOYED and call.starts >= EPHEMERAL_CRASHES:
            call.end(INTERNAL, "Container crashed too often.")
        elif call.result is None:
            await asyncio.sleep(min(2.0, 0.05 * 2**call.starts))  # crash-loop back-off, for ever

    def _expire(self, container: Container, limit: int) -> None:
        if container.call.container is container and container.call.result is None:
            container.call.end(TIMED_OUT, f"Task's current input in {container.id} hit its timeout of {limit}s")
            container.kill()

    async def _start(self, call: Call) -> Container:
        call.starts += 1
        id, function = self._new("ta"), call.function
        arguments = api_pb2.ContainerArguments(
            task_id=id, function_id=function.id, app_id=function.app.id, function_def=function.definition,
            environment_name="main", app_layout=self._layout(function.app),
        )  # fmt: skip
        path = self.folder / "args" / id
        path.write_bytes(arguments.SerializeToString())
        views = self._mount_volumes(id, function.definition)
        process = await asyncio.create_subprocess_exec(
            self._python(function.definition), "-P", "-m", "modal._container_entrypoint",
            env=self._environ(id, function.definition, path, views), cwd=self.folder / "home", start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            limit=1 << 24, preexec_fn=_heeds_sigint,
        )  # fmt: skip
        container = call.container = Container(id, call, process, asyncio.Event())
        self.containers[id] = container
        self._spawn(self._pump(container))
        self._spawn(self._commit_volumes(container, views))
        return container

    def _mount_volumes(self, id: str, definition: api_pb2.Function) -> dict[str, tuple[Path, Path]]:
        """Path in the container -> (what it sees there: the volume as it was committed, what is committed)."""
        found: dict[str, tuple[Path, Path]] = {}
        for mount in definition.volume_mounts:
            committed, view = (self.folder / "volumes" / mount.volume_id / name for name in ("committed", id))
            committed.mkdir(parents=True, exist_ok=True)
            shutil.copytree(committed, view, symlinks=True)
            found[mount.mount_path] = (view, committed)
        return found

    async def _commit_volumes(self, container: Container, views: dict[str, tuple[Path, Path]]) -> None:
        """When it has ended, however it did: Modal commits in the background.  Of two writers the last one wins."""
        await container.process.wait()
        for view, committed in views.values():
            subprocess.run(["cp", "-af", f"{view}/.", str(committed)], check=True)

    def _gpu(self, definition: api_pb2.Function) -> bool:
        return self.has_gpus and bool(definition.resources.gpu_config.gpu_type)

    def _python(self, definition: api_pb2.Function) -> str:
        """The interpreter of a container from its image."""
        image, gpu = definition.image_id, self._gpu(definition)
        folder = self.folder / "venvs" / (f"{image}-gpu" if gpu else image)
        return str(venv_of(packages_of(self._commands(image)), folder, gpu))

    def _commands(self, image_id: str) -> list[str]:
        image = self.images[image_id]
        before = [c for base in image.base_images for c in self._commands(base.image_id)]
        return [*before, *image.dockerfile_commands]

    def _environ(
        self, id: str, definition: api_pb2.Function, arguments: Path, views: dict[str, tuple[Path, Path]]
    ) -> dict[str, str]:
        """A mount is a folder of ours here, so variables that name its path name that."""
        secrets = {k: v for s in definition.secret_ids for k, v in self.secrets[s][1].items()}
        secrets = {k: str(views[v][0]) if v in views else v for k, v in secrets.items()}
        mounts = [self.mounted(m) for m in definition.mount_ids if m != "mo-client"]
        driver = {"LD_LIBRARY_PATH": str(stub_driver(self.folder / "driver"))} if self._gpu(definition) else {}
        return {
            "PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(self.folder / "home"), "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(mounts), "MODAL_SERVER_URL": self.url, "MODAL_IS_REMOTE": "1",
            "MODAL_TASK_ID": id, "MODAL_ENVIRONMENT": "main", "MODAL_IMAGE_ID": definition.image_id,
            "MODAL_CONTAINER_ARGUMENTS_PATH": str(arguments), "MODAL_OVERRIDE_HEADERS": f"{WHO}:{id}",
            "MODAL_HEARTBEAT_INTERVAL": str(2 * HEARTBEAT_S), **driver, **secrets,
        }  # fmt: skip

    async def _pump(self, container: Container) -> None:
        assert container.process.stdout is not None
        function = container.call.function
        async for line in container.process.stdout:
            text = line.decode(errors="replace")
            self.lines.append(Line(time.time_ns(), text, function.app.id, container.id, container.call.id))

    def ContainerHello(self, r: Any, who: str) -> Any:
        return Empty()

    async def ContainerHeartbeat(self, r: Any, who: str) -> Any:
        container = self.containers[who]
        with suppress(TimeoutError):
            await asyncio.wait_for(container.cancel.wait(), HEARTBEAT_S)
        if not (container.cancel.is_set() and container.delivered):
            return api_pb2.ContainerHeartbeatResponse()
        container.cancel.clear()
        event = api_pb2.CancelInputEvent(input_ids=[container.call.input_id])
        return api_pb2.ContainerHeartbeatResponse(cancel_input_event=event)

    async def FunctionGetInputs(self, r: Any, who: str) -> Any:
        container = self.containers[who]
        call = container.call
        if call.result is not None or call.cancelled:
            item = api_pb2.FunctionGetInputsItem(kill_switch=True)
        else:
            container.delivered = True
            limit = call.function.definition.timeout_secs
            self.loop.call_later(limit, self._expire, container, limit)
            item = api_pb2.FunctionGetInputsItem(
                input_id=call.input_id, input=call.input, function_call_id=call.id, attempt_token=f"at-{call.starts}"
            )
            item.input.final_input = True
        return api_pb2.FunctionGetInputsResponse(inputs=[item])

    def FunctionPutOutputs(self, r: Any, who: str) -> Any:
        call = self.containers[who].call
        if call.result is None:
            call.result, call.format = r.outputs[0].result, r.outputs[0].data_format
            call.done.set()
        return Empty()

    def TaskResult(self, r: Any, who: str) -> Any:
        call = self.containers[who].call
        if call.result is None:
            call.result = r.result
            call.done.set()
        return Empty()


class ModalPlatform:
    """The contract test's view of the server.   environ: what another process needs to reach it."""

    name = "modal"
    recipe = "from executors.platforms.on_modal.executor import ModalExecutor\nexecutor = ModalExecutor()"

    def __init__(self) -> None:
        self.server = ModalServer()
        self.environ: dict[str, str] = {}
        self._before: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        self.server.start()
        self.environ = {
            "MODAL_SERVER_URL": self.server.url,
            "MODAL_TOKEN_ID": "ak-test",
            "MODAL_TOKEN_SECRET": self.server.token,
            "MODAL_CONFIG_PATH": str(self.server.folder / "modal.toml"),
            "MODAL_BUILD_VALIDATION": "ignore",  # files may change while a test uploads them
        }
        self._before = {name: os.environ.get(name) for name in self.environ}
        os.environ.update(self.environ)
        forget_client()
        return self

    def __exit__(self, *_: object) -> None:
        forget_client()
        self.server.stop()
        for name, value in self._before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
        assert not self.server.errors, self.server.errors
        assert not self.server.deploys, f"containers deployed: {self.server.deploys}"

    def executor(self) -> ModalExecutor:
        return ModalExecutor()

    def url(self, name: str) -> str:
        return f"s3://bucket/{name}"

    # ------------------------------------------------------------------ faults

    def _container(self, handle: Handle) -> Container:
        container = self.server.calls[handle.native].container
        assert container is not None, f"{handle.slot} has no container now"
        return container

    def spoil(self, spec: ReplicaSpec) -> ReplicaSpec:
        mark = f"spoiled-{len(self.server.refused)}"
        self.server.refused.append(mark.encode())
        return ReplicaSpec.from_dict({**spec.to_dict(), "env": {**spec.env, "SPOILED": mark}})

    def kill(self, handle: Handle) -> None:
        container = self._container(handle)
        container.call.lost = True
        container.kill()

    def crash(self, handle: Handle) -> None:
        """SIGKILL, and a deployed app starts the same input again."""
        self._container(handle).kill()

    def preempt(self, handle: Handle) -> bool:
        container = self._container(handle)
        os.kill(container.process.pid, signal.SIGINT)
        self.server.loop.call_soon_threadsafe(self.server.loop.call_later, GRACE_S, container.kill)
        return True

    def hold(self, on: bool) -> bool:
        gate = self.server.open
        self.server.loop.call_soon_threadsafe(gate.clear if on else gate.set)
        return True

    def lose_reply(self) -> bool:
        self.server.faults.append(("FunctionMap", "lose", None))
        return True

    def refuse(self, method: str, times: int, status: Status = Status.UNAVAILABLE) -> None:
        self.server.faults += [(method, "refuse", status)] * times

    def drop_logs(self) -> bool:
        self.server.drop_logs_after = 5
        return True

    def with_gpus(self) -> list[Container]:
        """Containers that bill a GPU now."""
        found = [c.container for c in list(self.server.calls.values()) if c.container is not None]
        return [c for c in found if c.call.function.definition.resources.gpu_config.gpu_type]

    def live(self) -> int:
        """Containers with a replica in them."""
        calls = list(self.server.calls.values())
        return sum(c.container is not None and c.function.definition.implementation_name == "replica" for c in calls)


def forget_client() -> None:
    """The SDK keeps one client per process, and what it knows of the workspace."""
    import modal
    from modal import _environments

    modal.Client.from_env().close()
    _environments.ENVIRONMENT_CACHE.clear()
