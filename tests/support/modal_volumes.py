"""Modal's volumes (version 2) and what its dicts forget, for tests/support/modal_server.py.

    VolumePutFiles2 ──▶ which are missing ── PUT each ──▶ a token ──▶ VolumePutFiles2 with the tokens: the file appears
    VolumeGetFile2 ──▶ one URL for each block of the range; a body without the zeros at its end
    an entry of a dict that was not read or written for seven days is gone

Faults: `block_faults` ("503", "short", "cut") hit the next blocks; `ahead_s` moves the service's clock.

Not promised: whether listing keys counts as reading them (here it does not); how fast anything is.
"""

import hashlib
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web
from google.protobuf.empty_pb2 import Empty
from grpclib import GRPCError, Status
from modal_proto import api_pb2

BLOCK = 8 << 20
WEEK = 7 * 86_400.0


class Volumes:
    """Mixed into the server, before the class with the dicts."""

    dicts: dict[str, tuple[str, dict[bytes, bytes]]]
    blob_url: str

    def __init__(self) -> None:
        super().__init__()
        self.volumes: dict[str, tuple[str, Any, dict[str, tuple[int, list[bytes]]]]] = {}  # id -> name, version, files
        self.blocks: dict[bytes, bytes] = {}
        self._volume_numbers = itertools.count()
        self.block_faults: list[str] = []
        self.block_requests = Counter[str]()
        self.ahead_s = 0.0
        self._touched: dict[tuple[str, bytes], float] = {}

    # ------------------------------------------------------------------ volumes

    def VolumeGetOrCreate(self, r: Any, who: str) -> Any:
        found = [id for id, (name, _, _) in self.volumes.items() if name == r.deployment_name]
        if not found and r.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
            raise GRPCError(Status.NOT_FOUND, f"Volume '{r.deployment_name}' not found in environment 'main'")
        id = found[0] if found else f"vo-{next(self._volume_numbers):022d}"
        _, version, _ = self.volumes.setdefault(id, (r.deployment_name, r.version or 1, {}))
        metadata = api_pb2.VolumeMetadata(name=r.deployment_name, version=version)
        return api_pb2.VolumeGetOrCreateResponse(volume_id=id, version=version, metadata=metadata)

    def VolumeDelete(self, r: Any, who: str) -> Any:
        del self.volumes[r.volume_id]
        return Empty()

    def _files(self, id: str) -> dict[str, tuple[int, list[bytes]]]:
        if id not in self.volumes:
            raise GRPCError(Status.NOT_FOUND, f"Volume {id} not found")
        return self.volumes[id][2]

    def VolumePutFiles2(self, r: Any, who: str) -> Any:
        missing = [
            api_pb2.VolumePutFiles2Response.MissingBlock(
                file_index=i, block_index=k, put_url=f"{self.blob_url}/block-{block.contents_sha256.hex()}"
            )
            for i, file in enumerate(r.files)
            for k, block in enumerate(file.blocks)
            if block.contents_sha256 not in self.blocks or (block.put_response and not self._token_fits(block))
        ]
        if not missing:
            files = self._files(r.volume_id)
            if r.disallow_overwrite_existing_files and any(f.path in files for f in r.files):
                raise GRPCError(Status.ALREADY_EXISTS, "a file exists")
            for f in r.files:
                assert len(f.blocks) == -(-f.size // BLOCK), "the number of blocks does not fit the size"
                files[f.path.lstrip("/")] = f.size, [b.contents_sha256 for b in f.blocks]
        return api_pb2.VolumePutFiles2Response(missing_blocks=missing)

    def _token_fits(self, block: Any) -> bool:
        return block.put_response == b"token-" + block.contents_sha256

    def VolumeGetFile2(self, r: Any, who: str) -> Any:
        found = self._files(r.volume_id).get(r.path.lstrip("/"))
        if found is None:
            raise GRPCError(Status.NOT_FOUND, f"{r.path} does not exist")
        size, blocks = found
        start, end = min(r.start, size), min(size, r.start + r.len) if r.len else size
        numbers = range(start // BLOCK, -(-end // BLOCK)) if end > start else range(0)
        urls = [
            f"{self.blob_url}/block-{blocks[n].hex()}?from={max(start - n * BLOCK, 0)}&to={min(end - n * BLOCK, BLOCK)}"
            for n in numbers
        ]
        return api_pb2.VolumeGetFile2Response(get_urls=urls, size=size, start=start, len=max(0, end - start))

    def VolumeRemoveFile2(self, r: Any, who: str) -> Any:
        if self._files(r.volume_id).pop(r.path.lstrip("/"), None) is None:
            raise GRPCError(Status.NOT_FOUND, f"{r.path} does not exist")
        return Empty()

    async def VolumeListFiles2(self, r: Any, who: str) -> AsyncIterator[Any]:
        folder = r.path.strip("/")
        paths = [p for p in self._files(r.volume_id) if not folder or p.startswith(folder + "/")]
        if not paths and folder:
            raise GRPCError(Status.NOT_FOUND, f"{r.path} does not exist")
        for path in paths:
            entry = api_pb2.FileEntry(path=path, type=api_pb2.FileEntry.FILE, size=self._files(r.volume_id)[path][0])
            yield api_pb2.VolumeListFiles2Response(entries=[entry])

    async def serve_block(self, request: web.Request) -> web.Response:
        """PUT: stored under its digest, answered with a token.   GET: a slice, without the zeros at its end."""
        sha256 = bytes.fromhex(request.match_info["id"].removeprefix("block-"))
        self.block_requests[request.method] += 1
        fault = self.block_faults.pop(0) if self.block_faults else ""
        if fault == "503":
            return web.Response(status=503, text="injected")
        if request.method == "PUT":
            data = await request.read()
            if hashlib.sha256(data).digest() != sha256:
                return web.Response(status=400, text="these bytes have another digest")
            self.blocks[sha256] = data
            return web.Response(body=b"token-" + sha256)
        start, end = int(request.query["from"]), int(request.query["to"])
        data = self.blocks[sha256][start:end].rstrip(b"\0")
        if fault == "cut":  # the connection ends in the middle
            response = web.StreamResponse(headers={"Content-Length": str(len(data))})
            await response.prepare(request)
            await response.write(data[: len(data) // 2])
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        return web.Response(body=data + (b"x" * BLOCK if fault == "long" else b""))

    # ------------------------------------------------------------------ dicts that forget

    def _now(self) -> float:
        return time.time() + self.ahead_s

    def _entries(self, id: str, *touched: bytes) -> dict[bytes, bytes]:
        entries, now = self.dicts[id][1], self._now()
        for key in [k for k in entries if now - self._touched.setdefault((id, k), now) > WEEK]:
            del entries[key], self._touched[id, key]
        self._touched.update({(id, key): now for key in touched})
        return entries

    def DictGet(self, r: Any, who: str) -> Any:
        self._entries(r.dict_id, r.key)
        return super().DictGet(r, who)  # type: ignore[misc]

    def DictContains(self, r: Any, who: str) -> Any:
        self._entries(r.dict_id)
        return super().DictContains(r, who)  # type: ignore[misc]

    def DictUpdate(self, r: Any, who: str) -> Any:
        self._entries(r.dict_id)
        answer = super().DictUpdate(r, who)  # type: ignore[misc]
        self._entries(r.dict_id, *(u.key for u in r.updates))
        return answer

    def DictContents(self, r: Any, who: str) -> AsyncIterator[Any]:
        self._entries(r.dict_id)
        return super().DictContents(r, who)  # type: ignore[misc]

    def DictPop(self, r: Any, who: str) -> Any:
        value = self._entries(r.dict_id).pop(r.key, None)
        return api_pb2.DictPopResponse(found=value is not None, value=value)
