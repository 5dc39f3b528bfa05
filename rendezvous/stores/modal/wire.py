"""Single requests to Modal's Dict and Volume: no retries, and no unpickling of foreign objects.

    Wire ──gRPC──▶ DictGet, DictUpdate, DictPop, DictContents           entries: a text ─▶ bytes
         ──gRPC──▶ VolumePutFiles2, VolumeGetFile2, …Remove…, …List…    files
         ──HTTP──▶ the blocks                                           rendezvous/stores/modal/blocks.py

Modal's public `Dict.get` unpickles each value, so the writer of an entry could run code in every reader.  Its `Volume`
reads only whole files, and Modal's client retries creations whose answer was lost.  So this module sends the client's
internal requests, over the client's own connection and with its credentials.  Entries are written as the public client
writes them (a pickled text and pickled bytes: `modal dict items` shows them), and are read by a parser that accepts
only texts and bytes.

Not promised: that another version of the client has these requests.  modal 1.6 has them; if they are missing, `Wire`
raises an error.
"""

import asyncio
import io
import os
import pickle
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from rendezvous.errors import StoreError, StoreRefused, StoreUnclear
from rendezvous.stores.modal.blocks import BLOCK, Block, block_slices, blocks_of, cut_blocks, get_block, put_block

BLOCKS_AT_ONCE = 8
ANSWER_S = 20.0
STREAM_S = 120.0
CREATE, V2 = 1, 2  # OBJECT_CREATION_TYPE_CREATE_IF_MISSING, VOLUME_FS_VERSION_V2


def _usual_environment() -> str:
    """Return the client's environment: MODAL_ENVIRONMENT, or the profile's; "" for the workspace's default."""
    from modal.config import config

    return config["environment"] or ""


class Wire:
    """One Dict and one Volume (version 2) of the same name; a missing one is created.   Thread-safe."""

    def __init__(self, name: str, environment: str = "") -> None:
        self._pid = os.getpid()
        self.name = name
        self._pb, self._ask, self._stream = _connect_client()
        named: dict[str, Any] = {"deployment_name": name, "environment_name": environment or _usual_environment()}
        made = self._ask_once("DictGetOrCreate", "DictGetOrCreateRequest", object_creation_type=CREATE, **named)
        self._dict = made.dict_id
        made = self._ask_once(
            "VolumeGetOrCreate", "VolumeGetOrCreateRequest", object_creation_type=CREATE, version=V2, **named
        )
        if made.metadata.version not in (0, V2):
            raise StoreRefused(
                f"Modal has a volume called {name!r} of version {made.metadata.version}, and a run needs "
                "version 2. Take another name: modal://OTHER"
            )
        self._volume = made.volume_id

    # ------------------------------------------------------------------ entries

    def get_entry(self, key: str) -> bytes | None:
        """Return the bytes under a key, or None."""
        answer = self._ask_once("DictGet", "DictGetRequest", dict_id=self._dict, key=_pickle_plain(key))
        return (
            _unpickle_plain(answer.value, bytes, f"the entry {key!r} of Modal's dict {self.name}")
            if answer.found
            else None
        )

    def put_entry(self, key: str, value: bytes, if_absent: bool = False) -> bool:
        """Write an entry; with `if_absent`, only if the key has no entry.   Return whether this request wrote it."""
        update = self._pb.DictEntry(key=_pickle_plain(key), value=_pickle_plain(value))
        answer = self._ask_once(
            "DictUpdate", "DictUpdateRequest", dict_id=self._dict, updates=[update], if_not_exists=if_absent
        )
        return answer.created or not if_absent

    def pop_entry(self, key: str) -> None:
        """Delete an entry, if there is one."""
        self._ask_once("DictPop", "DictPopRequest", dict_id=self._dict, key=_pickle_plain(key))

    def all_keys(self) -> list[str]:
        """Return all keys that are texts, in no order. This reads the whole Dict."""
        entries = self._ask_stream("DictContents", "DictContentsRequest", dict_id=self._dict, keys=True)
        return [key for entry in entries if (key := _unpickle_text(entry.key)) is not None]

    # ------------------------------------------------------------------ files

    def upload_file(self, path: str, blocks: list[Block], pieces: Iterable[memoryview]) -> None:
        """Write a file, which is visible when it is complete.

        pieces: the bytes of `blocks`; they are read only if the volume lacks a block.
        """
        missing: Any = self._put_files({path: blocks}, {})
        if missing:
            tokens = self._send_blocks(blocks, {blocks[int(m.block_index)].sha256: m.put_url for m in missing}, pieces)
            if self._put_files({path: blocks}, tokens):
                raise StoreUnclear(f"Modal's volume {self.name} misses blocks of {path} that were just sent")

    def write_files(self, bodies: Mapping[str, bytes]) -> None:
        """Write small files by one request.  If the volume lacks blocks, PUT each of these and repeat the request."""
        paths = list(bodies)
        files: dict[str, list[Block]] = {path: blocks_of([memoryview(bodies[path])]) for path in paths}
        missing: Any = self._put_files(files, {})
        if not missing:
            return
        tokens: dict[bytes, bytes] = {}
        for m in missing:
            path = paths[int(m.file_index)]
            number = int(m.block_index)
            data = memoryview(bodies[path])[number * BLOCK : (number + 1) * BLOCK]
            tokens[files[path][number].sha256] = put_block(m.put_url, data)
        if self._put_files(files, tokens):
            raise StoreUnclear(f"Modal's volume {self.name} misses blocks of {len(files)} files that were just sent")

    def read_into(self, path: str, out: memoryview, start: int = 0) -> bool:
        """Fill `out` from byte `start` of a file; False if there is no such file, or only a shorter one."""
        found = self._locate_blocks(path, start, len(out))
        if found is None or (found.start, found.len) != (start, len(out)):
            return False
        with ThreadPoolExecutor(BLOCKS_AT_ONCE) as pool:
            list(pool.map(get_block, found.get_urls, block_slices(out, start)))
        return True

    def read_file(self, path: str) -> bytes | None:
        """Return a whole file, or None."""
        found = self._locate_blocks(path, 0, 0)
        if found is None:
            return None
        out = bytearray(found.size)
        return bytes(out) if not out or self.read_into(path, memoryview(out)) else None

    def remove_file(self, path: str) -> None:
        """Delete a file, if there is one."""
        self._ask_once("VolumeRemoveFile2", "VolumeRemoveFile2Request", volume_id=self._volume, path=path, absent=True)

    def list_files(self, folder: str) -> dict[str, int]:
        """Return path -> size in bytes for all files below a folder, the newest last."""
        asked: dict[str, Any] = {"volume_id": self._volume, "path": folder, "recursive": True}
        parts = self._ask_stream("VolumeListFiles2", "VolumeListFiles2Request", **asked)
        entries = [entry for part in parts for entry in part.entries if entry.type in (0, self._pb.FileEntry.FILE)]
        return {entry.path.lstrip("/"): entry.size for entry in sorted(entries, key=lambda e: e.mtime)}

    def _locate_blocks(self, path: str, start: int, size: int) -> Any:
        return self._ask_once(
            "VolumeGetFile2", "VolumeGetFile2Request", volume_id=self._volume, path=path, start=start, len=size,
            client_pads_blocks=True, absent=True,
        )  # fmt: skip

    def _put_files(self, files: Mapping[str, list[Block]], tokens: Mapping[bytes, bytes]) -> list[Any]:
        kind = self._pb.VolumePutFiles2Request
        asked = [
            kind.File(
                path=path, size=sum(b.size for b in blocks), mode=0o644,
                blocks=[kind.Block(contents_sha256=b.sha256, put_response=tokens.get(b.sha256)) for b in blocks],
            )
            for path, blocks in files.items()
        ]  # fmt: skip
        answer = self._ask_once("VolumePutFiles2", "VolumePutFiles2Request", volume_id=self._volume, files=asked)
        return list(answer.missing_blocks)

    def _send_blocks(
        self, blocks: list[Block], urls: dict[bytes, str], pieces: Iterable[memoryview]
    ) -> dict[bytes, bytes]:
        """PUT the missing blocks, each once and a few at a time.   Return sha256 -> the server's token.

        urls: sha256 -> URL, for each missing block.
        """
        tokens = dict[bytes, bytes]()
        running = list[tuple[bytes, Future[bytes]]]()
        with ThreadPoolExecutor(BLOCKS_AT_ONCE) as pool:
            for block, data in zip(blocks, cut_blocks(pieces), strict=True):
                if (url := urls.pop(block.sha256, None)) is not None:
                    running.append((block.sha256, pool.submit(put_block, url, data)))
                while len(running) >= BLOCKS_AT_ONCE:
                    sha256, put = running.pop(0)
                    tokens[sha256] = put.result()
            return tokens | {sha256: put.result() for sha256, put in running}

    # ------------------------------------------------------------------ requests

    def _ask_once(self, method: str, message: str, *, absent: bool = False, **fields: Any) -> Any:
        """Return the answer; with `absent`, None for a missing object.   Raise StoreRefused or StoreUnclear."""
        return self._send(self._ask, method, message, absent, fields)

    def _ask_stream(self, method: str, message: str, **fields: Any) -> list[Any]:
        """Return the parts of the answer, [] for a missing object.   Raise StoreRefused or StoreUnclear."""
        return self._send(self._stream, method, message, True, fields) or []

    def _send(self, ask: Any, method: str, message: str, absent: bool, fields: dict[str, Any]) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"modal://{self.name} was opened in process {self._pid}; after a fork, open it again or use spawn"
            )
        try:
            return ask(method, getattr(self._pb, message)(**fields))
        except Exception as error:  # errors of the client, of gRPC, of the system
            if absent and type(error).__name__ == "NotFoundError":
                return None
            raise explain_error(f"{method} on {self.name}", error) from None


# ---------------------------------------------------------------------- the client's connection


@cache
def _connect_client() -> tuple[Any, Any, Any]:
    """Return the client's message types, a function that gets one answer, and one for a stream of answers."""
    try:
        from modal import client
        from modal._utils import async_utils
        from modal_proto import api_pb2
    except ImportError as error:
        raise ImportError(
            f"modal:// needs Modal's client, version 1.6 ({error}): pip install 'serverless-diloco[serverless]'"
        ) from error

    from_env: Any = client._Client.from_env  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType, reportUnknownVariableType]
    blocking: Any = async_utils.synchronize_api  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]

    async def ask(method: str, request: Any) -> Any:
        stub = (await from_env())._stub
        return await getattr(stub, method)(request, retry=None, timeout=ANSWER_S)

    async def stream(method: str, request: Any) -> list[Any]:
        stub = (await from_env())._stub

        async def parts() -> list[Any]:
            return [part async for part in getattr(stub, method).unary_stream(request)]

        return await asyncio.wait_for(parts(), STREAM_S)

    return api_pb2, blocking(ask, __name__), blocking(stream, __name__)


def explain_error(what: str, error: Exception) -> StoreError:
    """Return our StoreError for an error of the client."""
    if isinstance(error, StoreError):
        return error
    name = type(error).__name__
    said = str(error).splitlines()[0][:200] if str(error) else ""
    if name == "AuthError":
        first = said.partition(". ")[0]
        return StoreRefused(
            f"Modal does not know who you are ({first}). Run `modal token new`, or set MODAL_TOKEN_ID and "
            "MODAL_TOKEN_SECRET"
        )
    if name == "PermissionDeniedError":
        return StoreRefused(
            f"Modal refused {what}: {said}. Use a token that may write dicts and volumes of this environment"
        )
    if name in ("NotFoundError", "InvalidError", "UnimplementedError", "VersionError", "AttributeError"):
        return StoreRefused(
            f"Modal refused {what}: {name} {said}. Is modal 1.6 installed, and does the environment exist?"
        )
    return StoreUnclear(f"no usable answer to {what}: {name} {said}".rstrip())


# ---------------------------------------------------------------------- entries as the public client writes them


def _pickle_plain(value: str | bytes) -> bytes:
    return pickle.dumps(value, 4)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of texts and bytes, which refuses a pickle that names a class or a function, before any call."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module_name}.{global_name}")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError("it refers to something outside")


def _unpickle_plain(data: bytes, kind: type, what: str) -> Any:
    try:
        value = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:  # bytes that are not a pickle may raise anything
        raise StoreRefused(
            f"{what} was not written by a run ({error}), and it is not read. Take another name: modal://OTHER"
        ) from None
    if type(value) is not kind:
        raise StoreRefused(
            f"{what} holds a {type(value).__name__}, not {kind.__name__}: no run wrote it. Take another name: modal://OTHER"
        )
    return value


def _unpickle_text(data: bytes) -> str | None:
    try:
        return _unpickle_plain(data, str, "a key")
    except StoreRefused:
        return None
