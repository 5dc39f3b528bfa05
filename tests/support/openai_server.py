"""An OpenAI-like chat server on loopback that gives prepared answers as server-sent events.

    last user text ──▶ answers[text] ──▶ one chunk with the text, one with the end, [DONE]

Not promised: anything without "stream": true; tools; tokens or log-probs.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.support.loopback import serve

HEAD = {"id": "c", "created": 1, "model": "m", "object": "chat.completion.chunk"}
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


@contextmanager
def serve_answers(answers: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """-> the address, ending in /v1, and the texts that were asked."""
    asked = list[str]()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            text = [m["content"] for m in body["messages"] if m["role"] == "user"][-1]
            asked.append(text)
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.end_headers()
            delta = {"role": "assistant", "content": answers[text]}
            for choice, more in (
                ({"index": 0, "delta": delta, "finish_reason": None}, {}),
                ({"index": 0, "delta": {}, "finish_reason": "stop"}, {"usage": USAGE}),
            ):
                self.wfile.write(f"data: {json.dumps({**HEAD, **more, 'choices': [choice]})}\n\n".encode())
            self.wfile.write(b"data: [DONE]\n\n")

    with serve(Handler) as address:
        yield f"{address}/v1", asked
