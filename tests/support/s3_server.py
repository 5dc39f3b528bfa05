"""An S3 server that goes wrong on request.  Standard library, loopback, a thread per connection.

    with S3Server() as s3:                                   s3.endpoint   http://127.0.0.1:PORT
        s3.fault("lost", op="PutObject", key="commit", times=3)
        s3.expired = True                                    every request from now on: 400 ExpiredToken

    python -m tests.support.s3_server PORT ROOT                      the same as a process; PORT 0 takes a free one
    POST /-/control {"fault": {"kind": "503", "op": "Put"}, "latency_s": 0.08, "overwrites": true}
    GET  /-/control                                          how many requests of each kind there were

kind        what the client sees                      kind      what the client sees
lost        effect done, connection dropped           slow      the answer, `seconds` late
dropped     no effect, connection dropped             truncated half the body, then a dropped connection
409 412 500 503 403 404   that status, no effect      short     a whole answer with half the bytes of the range
302         "look at `location`"                      expired   400 ExpiredToken

An object "a/b" lies in ROOT/bucket/a,/b= so that the keys "a" and "a/b" can stand side by side.
Not promised: signatures (only the access key is looked at), ACLs, versions, If-Match, anything not named here.
"""

import contextlib
import io
import json
import os
import random
import re
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

PIECE = 1 << 20
LONGEST_S = 120.0  # of an answer that waits for a test
SLOW_PIECE = 1 << 16  # of a limited link: so that requests take turns
NAMES = {
    "400": "ExpiredToken",
    "403": "AccessDenied",
    "404": "NoSuchBucket",
    "409": "ConditionalRequestConflict",
    "412": "PreconditionFailed",
    "500": "InternalError",
    "501": "NotImplemented",
    "503": "SlowDown",
}
MESSAGES = {
    "InvalidRange": "The requested range is not satisfiable",
    "NoSuchBucket": "The specified bucket does not exist",
    "PreconditionFailed": "At least one of the pre-conditions you specified did not hold",
}


@dataclass
class Fault:
    """The next `times` requests whose operation and key match go wrong, each with this probability."""

    kind: str
    op: str = ""  # a regular expression, as is `key`
    key: str = ""
    times: int = 1
    probability: float = 1.0
    seconds: float = 0.0
    until: threading.Event | None = None  # slow: no answer before this
    location: str = ""

    def hits(self, op: str, key: str, dice: random.Random) -> bool:
        met = self.times > 0 and re.search(self.op, op) and re.search(self.key, key)
        return bool(met) and dice.random() < self.probability


class Upload:
    """A multipart upload, written where it will lie: all parts but the last must be equal, as R2 demands too."""

    def __init__(self, folder: Path) -> None:
        fd, name = tempfile.mkstemp(dir=folder)
        os.close(fd)
        self.path, self.size, self.sizes = Path(name), 0, dict[int, int]()
        self._apart: dict[int, bytes] = {}  # came before the first part did

    def write(self, number: int, pieces: Iterator[memoryview], size: int) -> None:
        if number == 1:
            self.size = size
        if not self.size:
            self._apart[number] = b"".join(map(bytes, pieces))
            self.sizes[number] = len(self._apart[number])
            return
        at = start = (number - 1) * self.size
        with open(self.path, "r+b", buffering=0) as f:
            for piece in pieces:
                at += os.pwrite(f.fileno(), piece, at)
        self.sizes[number] = at - start

    def finish(self) -> Path | None:
        """The object's file; None if a part is missing or has another size than the first."""
        for number, body in self._apart.items():
            self.write(number, iter([memoryview(body)]), len(body))
        last = max(self.sizes, default=0)
        good = sorted(self.sizes) == list(range(1, last + 1))
        good = good and all(s == self.size or (n == last and s <= self.size) for n, s in self.sizes.items())
        return self.path if good else None


class Link:
    """Bytes per second, shared by all clients that send or receive through it; None: no limit."""

    def __init__(self, rate: float | None) -> None:
        self.rate, self._free_at, self._lock = rate, 0.0, threading.Lock()

    def wait_for(self, size: int) -> None:
        if not self.rate:
            return
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + size / self.rate
            pause = self._free_at - time.monotonic()
        time.sleep(max(0.0, pause))


class S3Server:
    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        port: int = 0,
        *,
        buckets: tuple[str, ...] = ("bucket",),
        base: str = "",  # a path in front of the bucket, as some gateways have
        latency_s: float = 0.0,
        rate: float | None = None,
        connection_rate: float | None = None,
        overwrites: bool = False,
        access_key: str | None = None,
        page: int = 1000,
        seed: int = 0,
    ) -> None:
        self._own_root = None if root else tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
        self.root, self.base, self.page = Path(root or self._own_root or ""), base, page
        self.latency_s, self.connection_rate, self.link = latency_s, connection_rate, Link(rate)
        self.overwrites, self.access_key, self.expired = overwrites, access_key, False
        self.faults: list[Fault] = []
        self.requests: list[tuple[str, str]] = []  # (operation, key), in order of arrival
        self.uploads: dict[str, Upload] = {}
        self.bodies: list[str] = []  # of error replies in place of the usual ones, for tests of leaks
        self._dice, self._lock = random.Random(seed), threading.Lock()
        self.tmp = self.root / ".tmp"
        self.tmp.mkdir(parents=True, exist_ok=True)
        for bucket in buckets:
            (self.root / bucket).mkdir(exist_ok=True)
        self._http = _Http(("127.0.0.1", port), _Handler)
        self._http.s3 = self
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}{base}"

    def __enter__(self) -> "S3Server":
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._http.hang_up()
        if self._own_root:
            shutil.rmtree(self._own_root, ignore_errors=True)

    def serve(self) -> None:
        """Until the process ends."""
        self._http.serve_forever()

    def fault(self, kind: str, **when: Any) -> None:
        with self._lock:
            self.faults.append(Fault(kind, **when))

    def count(self, op: str, key: str = "") -> int:
        return sum(bool(re.search(op, o) and re.search(key, k)) for o, k in list(self.requests))

    def control(self, wish: dict[str, Any]) -> None:
        for name, value in wish.items():
            if name == "fault":
                self.fault(**value)
            elif name == "rate":
                self.link = Link(value)
            else:
                getattr(self, name)  # a typing error shall not pass silently
                setattr(self, name, value)

    def met(self, op: str, key: str) -> Fault | None:
        """The fault that this request runs into, used up once."""
        with self._lock:
            self.requests.append((op, key))
            fault = next((f for f in self.faults if f.hits(op, key, self._dice)), None)
            if fault:
                fault.times -= 1
        return fault

    def path(self, bucket: str, key: str) -> Path:
        *folders, name = (quote(part, safe="") for part in key.split("/"))
        return self.root.joinpath(bucket, *(f"{f}," for f in folders), f"{name}=")

    def keys(self, bucket: str, prefix: str) -> list[str]:
        top = self.path(bucket, prefix).parent
        found = [Path(path, f) for path, _, files in os.walk(top) for f in files]
        keys = ["/".join(unquote(p[:-1]) for p in f.relative_to(self.root / bucket).parts) for f in found]
        return sorted((k for k in keys if k.startswith(prefix)), key=str.encode)


class _Http(ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 256
    s3: S3Server

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._open: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._open.discard(request)
        super().shutdown_request(request)

    def hang_up(self) -> None:
        for sock in list(self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Chunked(io.RawIOBase):
    """Undoes one layer of chunk framing: HTTP's, or aws-chunked (whose size line carries ";chunk-signature=…")."""

    def __init__(self, source: Any) -> None:
        self._source, self._left, self._done = source, 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, out: Any) -> int:
        if self._left == 0 and not self._done:
            self._left = int(self._source.readline().split(b";")[0], 16)
            self._done = self._left == 0
            while self._done and self._source.readline().strip():
                pass  # trailers
        n = self._source.readinto(memoryview(out)[: self._left]) if self._left else 0
        self._left -= n
        if n and self._left == 0:
            self._source.readline()
        return n


class _Handler(BaseHTTPRequestHandler):
    protocol_version, rbufsize, disable_nagle_algorithm = "HTTP/1.1", 1 << 16, True
    server: _Http

    def setup(self) -> None:
        super().setup()
        self.s3 = self.server.s3
        self.own_link = Link(self.s3.connection_rate)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    # ------------------------------------------------------------------ one request

    def _request(self) -> None:
        url = urlsplit(self.path)
        self.query = dict(parse_qsl(url.query, keep_blank_values=True))
        if url.path == "/-/control":
            return self._control()
        path = unquote(url.path)
        self.misplaced = not path.startswith(self.s3.base + "/")
        self.bucket, _, self.key = path.removeprefix(self.s3.base).lstrip("/").partition("/")
        op = self._operation()
        self.lost = self.cut = self.short = False
        fault = self.s3.met(op, self.key)
        time.sleep(self.s3.latency_s)
        if (self._refused() or (fault and self._went_wrong(fault))) is not True:
            getattr(self, op, self._unknown)()
        if self.lost:
            raise ConnectionAbortedError

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _request

    def _operation(self) -> str:
        q, key = self.query, self.key
        match self.command:
            case "PUT":
                return "UploadPart" if "partNumber" in q else "PutObject" if key else "CreateBucket"
            case "GET":
                return "GetObject" if key else "ListObjectsV2"
            case "HEAD":
                return "HeadObject" if key else "HeadBucket"
            case "DELETE":
                return "AbortMultipartUpload" if "uploadId" in q else "DeleteObject"
            case _:
                return "DeleteObjects" if "delete" in q else self._multipart_operation()

    def _multipart_operation(self) -> str:
        return "CreateMultipartUpload" if "uploads" in self.query else "CompleteMultipartUpload"

    def _refused(self) -> bool:
        """Whether an error was answered because of the client's credentials or the bucket."""
        if self.s3.expired:
            return self._error(400, "ExpiredToken")
        said = self.headers.get("Authorization", "")
        if self.s3.access_key and f"={self.s3.access_key}/" not in said:
            return self._error(403, "InvalidAccessKeyId" if said else "AccessDenied")
        known = not self.misplaced and (self.s3.root / self.bucket).is_dir()
        return not known and self.command != "PUT" and self._error(404, "NoSuchBucket")

    def _went_wrong(self, fault: Fault) -> bool:
        """True if the request is answered by that; else the fault waits for the answer."""
        self.lost, self.cut = fault.kind == "lost", fault.kind == "truncated"
        self.short = fault.kind == "short"
        if fault.kind == "slow":
            time.sleep(fault.seconds) if fault.until is None else fault.until.wait(LONGEST_S)
        if fault.kind == "dropped":
            raise ConnectionAbortedError
        if fault.kind == "302":
            return self._answer(302, headers={"Location": fault.location})
        status = "400" if fault.kind == "expired" else fault.kind
        return status in NAMES and self._error(int(status), NAMES[status])

    def _control(self) -> None:
        if self.command == "POST":
            self.s3.control(json.loads(b"".join(self._body())))
        self.lost = False
        self._answer(200, json.dumps(Counter(op for op, _ in self.s3.requests)).encode())

    def _unknown(self) -> None:
        self._error(501, "NotImplemented")

    # ------------------------------------------------------------------ bytes in, bytes out

    def _body(self) -> Iterator[memoryview]:
        """The request's body in pieces of one buffer; a handler that answers without reading it must hang up."""
        self.unread = False
        source: Any = self.rfile
        left: float = int(self.headers.get("Content-Length") or 0)
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            source, left = io.BufferedReader(_Chunked(source)), float("inf")
        if self.headers.get("x-amz-content-sha256", "").startswith("STREAMING"):
            source, left = io.BufferedReader(_Chunked(source)), float("inf")
        piece = PIECE if self._free else SLOW_PIECE
        view = memoryview(bytearray(min(piece, int(left)) if left < float("inf") else piece))
        while left and (n := source.readinto(view[: int(min(left, len(view)))])):
            self._wait_for(n)
            left -= n
            yield view[:n]

    @property
    def _free(self) -> bool:
        return not (self.s3.link.rate or self.own_link.rate)

    def _wait_for(self, size: int) -> None:
        self.s3.link.wait_for(size)
        self.own_link.wait_for(size)

    def parse_request(self) -> bool:
        parsed = super().parse_request()
        self.unread = parsed and self.command in ("PUT", "POST")
        return parsed

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, size: int = -1) -> bool:
        for _ in self._body() if self.unread else ():
            pass
        if self.lost:
            return True
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body) if size < 0 else size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        return True

    def _error(self, status: int, name: str) -> bool:
        text = (
            self.s3.bodies.pop(0)
            if self.s3.bodies
            else f"<Error><Code>{name}</Code><Message>{MESSAGES.get(name, name)}</Message></Error>"
        )
        return self._answer(status, f'<?xml version="1.0"?>{text}'.encode(), {"Content-Type": "application/xml"})

    def _xml(self, text: str) -> None:
        self._answer(200, f'<?xml version="1.0"?>{text}'.encode(), {"Content-Type": "application/xml"})

    # ------------------------------------------------------------------ the operations of S3

    def CreateBucket(self) -> None:
        (self.s3.root / self.bucket).mkdir(exist_ok=True)
        self._answer(200)

    def HeadBucket(self) -> None:
        self._answer(200)

    def PutObject(self) -> None:
        if self.misplaced or not (self.s3.root / self.bucket).is_dir():
            self._error(404, "NoSuchBucket")
        elif self._publish(self._received()):
            self._answer(200, headers={"ETag": f'"{uuid.uuid4().hex}"', "x-goog-generation": "1"})
        else:
            self._error(412, "PreconditionFailed")

    def _received(self) -> Path:
        fd, name = tempfile.mkstemp(dir=self.s3.tmp)
        try:
            for piece in self._body():
                os.write(fd, piece)
        finally:
            os.close(fd)
        return Path(name)

    def _publish(self, tmp: Path) -> bool:
        """Make a finished file the object; False if it had to be new and is not."""
        path = self.s3.path(self.bucket, self.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        asked = self.headers.get("If-None-Match") == "*" or self.headers.get("x-goog-if-generation-match") == "0"
        if not asked or self.s3.overwrites:
            tmp.replace(path)
            return True
        try:
            os.link(tmp, path)
            return True
        except FileExistsError:
            return False
        finally:
            tmp.unlink()

    def GetObject(self) -> None:
        try:
            with open(self.s3.path(self.bucket, self.key), "rb") as f:
                self._send(f)
        except FileNotFoundError:
            self._error(404, "NoSuchKey")

    HeadObject = GetObject

    def _send(self, f: io.BufferedReader) -> None:
        info = os.fstat(f.fileno())
        start, end, total = *self._range(info.st_size), info.st_size
        if start >= end and "Range" in self.headers:
            self._error(416, "InvalidRange")
            return
        end = start + (end - start) // 2 if self.short else end
        part = {"Content-Range": f"bytes {start}-{end - 1}/{total}"} if "Range" in self.headers else {}
        when = formatdate(info.st_mtime, usegmt=True)
        etag = f'"{info.st_ino:x}-{info.st_mtime_ns:x}"'
        about = {"ETag": etag, "Last-Modified": when, "Accept-Ranges": "bytes", "x-goog-generation": "1"}
        self._answer(206 if part else 200, headers={**about, **part}, size=end - start)
        if self.command == "GET" and not self.lost:
            self._pour(f, start, start + (end - start) // 2 if self.cut else end)
        self.lost |= self.cut

    def _range(self, size: int) -> tuple[int, int]:
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        if not first:
            return max(0, size - int(last)), size
        return int(first), min(size, int(last) + 1 if last else size)

    def _pour(self, f: io.BufferedReader, at: int, end: int) -> None:
        while at < end:
            n = min(end - at, 1 << 22 if self._free else SLOW_PIECE)
            self._wait_for(n)
            at += os.sendfile(self.connection.fileno(), f.fileno(), at, n)

    def DeleteObject(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.s3.path(self.bucket, self.key).unlink()
        self._answer(204)

    def DeleteObjects(self) -> None:
        keys = re.findall("<Key>(.*?)</Key>", b"".join(self._body()).decode())
        for key in keys:
            with contextlib.suppress(FileNotFoundError):
                self.s3.path(self.bucket, unescape(key)).unlink()
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
        self._xml(f"<DeleteResult>{gone}</DeleteResult>")

    def ListObjectsV2(self) -> None:
        q = self.query
        prefix, delimiter = q.get("prefix", ""), q.get("delimiter", "")
        after = q.get("continuation-token") or q.get("start-after") or ""
        limit = min(self.s3.page, int(q.get("max-keys") or 1000))
        names = dict.fromkeys(_grouped(k, prefix, delimiter) for k in self.s3.keys(self.bucket, prefix))
        left = [n for n in names if n.encode() > after.encode()]
        page, more = left[:limit], len(left) > limit
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self._xml(
            f"<ListBucketResult><Name>{self.bucket}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(page)}"
            f"</KeyCount><MaxKeys>{limit}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}"
            + "".join(self._entry(n, bool(delimiter)) for n in page)
            + "</ListBucketResult>"
        )

    def _entry(self, name: str, grouped: bool) -> str:
        if grouped and name.endswith("/"):
            return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        try:
            info = self.s3.path(self.bucket, name).stat()
        except FileNotFoundError:  # deleted meanwhile
            return ""
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(info.st_mtime))
        return (
            f'<Contents><Key>{escape(name)}</Key><LastModified>{when}</LastModified><ETag>"{info.st_ino:x}"</ETag>'
            f"<Size>{info.st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
        )

    def CreateMultipartUpload(self) -> None:
        upload = uuid.uuid4().hex
        self.s3.uploads[upload] = Upload(self.s3.tmp)
        self._multipart_xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")

    def UploadPart(self) -> None:
        upload = self.s3.uploads.get(self.query["uploadId"])
        if upload is None:
            self._error(404, "NoSuchUpload")
            return
        size = self.headers.get("x-amz-decoded-content-length") or self.headers.get("Content-Length") or 0
        upload.write(int(self.query["partNumber"]), self._body(), int(size))
        self._answer(200, headers={"ETag": f'"{uuid.uuid4().hex}"'})

    def CompleteMultipartUpload(self) -> None:
        upload = self.s3.uploads.pop(self.query["uploadId"], None)
        finished = upload and upload.finish()
        if not finished:
            self._error(*((400, "InvalidPart") if upload else (404, "NoSuchUpload")))
        elif self._publish(finished):
            self._multipart_xml("CompleteMultipartUploadResult", f'<ETag>"{uuid.uuid4().hex}"</ETag>')
        else:
            self._error(412, "PreconditionFailed")

    def AbortMultipartUpload(self) -> None:
        if upload := self.s3.uploads.pop(self.query["uploadId"], None):
            upload.path.unlink()
        self._answer(204)

    def _multipart_xml(self, name: str, text: str) -> None:
        self._xml(f"<{name}><Bucket>{self.bucket}</Bucket><Key>{escape(self.key)}</Key>{text}</{name}>")


def _grouped(key: str, prefix: str, delimiter: str) -> str:
    at = key.find(delimiter, len(prefix)) if delimiter else -1
    return key[: at + len(delimiter)] if at >= 0 else key


if __name__ == "__main__":
    server = S3Server(sys.argv[2], int(sys.argv[1]))
    print(server.endpoint, flush=True)
    server.serve()
