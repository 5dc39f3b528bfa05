"""An OpenAI-compatible endpoint on this machine, with teachers that know ToolWorld: for trying things without a key.

    python examples/local_teachers.py --port 8000          then: --base-url http://127.0.0.1:8000/v1 --teacher expert-0

    asked "op3 4 5"                             answers with a call of one of ToolWorld's tools
    right with probability `accuracy`           else half of the answers have the mistake that all teachers share
    told what a tool said                       repeats it; after an error, calls again

An answer is a function of teacher and question. Words count as tokens, so that costs can be computed.

Not promised: that real teachers are like this. They are slower, cost more, and make other mistakes.
"""

import argparse
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from random import Random
from typing import Any

from inner import ToolWorld

Reply = Callable[[Mapping[str, Any]], dict[str, Any]]


def answer(world: ToolWorld, teacher: str, messages: Sequence[Mapping[str, Any]], accuracy: float) -> dict[str, Any]:
    """Return the teacher's turn."""
    last = messages[-1]
    if last["role"] == "tool" and not str(last["content"]).startswith("{'error'"):
        return {"role": "assistant", "content": str(last["content"])}
    kind, a, b = question(messages)
    name = tool_name(world, teacher, f"{kind} {a} {b}", kind, accuracy)
    call = {"name": name, "arguments": json.dumps({"a": a, "b": b})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
    }


def tool_name(world: ToolWorld, teacher: str, asked: str, kind: int, accuracy: float) -> str:
    chance = Random(f"{teacher}:{asked}")
    if chance.random() < accuracy:
        return world.right_name(kind)
    if chance.random() < 0.5:
        return wrong_name(world, kind)
    return world.name(kind, chance.randrange(world.names))


def wrong_name(world: ToolWorld, kind: int) -> str:
    """Return a tool name that does not exist, the same every time."""
    wrong = [world.name(kind, s) for s in range(world.names) if world.name(kind, s) != world.right_name(kind)]
    return wrong[Random(4321 + kind).randrange(len(wrong))]


def question(messages: Sequence[Mapping[str, Any]]) -> tuple[int, int, int]:
    """ "op3 4 5" -> (3, 4, 5)"""
    text = next(str(m["content"]) for m in messages if m["role"] == "user")
    kind, a, b = text.split()[:3]
    return int(kind.removeprefix("op")), int(a), int(b)


def reply(world: ToolWorld, body: Mapping[str, Any], accuracy: float) -> dict[str, Any]:
    message = answer(world, body["model"], body["messages"], accuracy)
    asked = len(json.dumps([body["messages"], body.get("tools")]).split())
    usage = {"prompt_tokens": asked, "completion_tokens": len(json.dumps(message).split())}
    return {
        "model": body["model"],
        "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
        "usage": usage,
    }


def serving(world: ToolWorld, accuracy: float = 0.8, port: int = 0) -> AbstractContextManager[str]:
    """Serve ToolWorld's teachers until the `with` ends. Gives the base URL."""
    return serving_replies(lambda body: reply(world, body, accuracy), port)


@contextmanager
def serving_replies(reply: Reply, port: int = 0) -> Iterator[str]:
    """Serve until the `with` ends. Gives the base URL.   reply: a request's body -> the answer's."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(reply))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()


def _handler(reply: Reply) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            try:
                status, said = 200, reply(body)
            except (KeyError, ValueError, StopIteration) as error:
                status, said = (
                    400,
                    {"error": {"code": 400, "message": f"not a question for these teachers: {error!r}"}},
                )
            raw = json.dumps(said).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

    return Handler


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--kinds", type=int, default=6)
    parser.add_argument("--names", type=int, default=32)
    given = parser.parse_args()
    with serving(ToolWorld(given.kinds, given.names), given.accuracy, given.port) as url:
        print(f"teachers at {url}; ctrl-C ends it", flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
