"""An inference server on loopback that answers as vLLM's does, with transformers inside.

    /v1/load_lora_adapter, /v1/unload_lora_adapter ──▶ adapters       /v1/completions ──▶ ids and log-probs

`change` may rewrite each answer of /v1/completions, as a broken or another server would send it.  `busy`: how many
answers are 503 first.  `lose`: how many answers are lost when their request has been served.
Not promised: texts; requests at once.
"""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.support.loopback import serve

Answer = tuple[int, dict[str, Any]]


class EngineState:
    """What the server holds.   asked: the bodies of all requests, by path."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.models = dict[str, Any]()
        self.asked = list[tuple[str, dict[str, Any]]]()
        self.change: Callable[[dict[str, Any]], Any] = lambda answer: answer
        self.busy = self.lose = 0
        self.key = ""
        self.lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> Answer:
        self.asked.append((path, body))
        if self.busy:
            self.busy -= 1
            return 503, {"error": {"message": "overloaded"}}
        if path == "/v1/load_lora_adapter":
            if not (Path(body["lora_path"]) / "adapter_config.json").exists():
                return 404, {"error": {"message": "No adapter found"}}
            if body["lora_name"] in self.models:
                return 400, {"error": {"message": f"The lora adapter '{body['lora_name']}' has already been loaded."}}
            model = AutoModelForCausalLM.from_pretrained(self.base, dtype=torch.float32)
            self.models[body["lora_name"]] = PeftModel.from_pretrained(model, body["lora_path"]).eval()
        elif path == "/v1/unload_lora_adapter":
            if self.models.pop(body["lora_name"], None) is None:
                return 404, {"error": {"message": f"The lora adapter '{body['lora_name']}' cannot be found."}}
        elif body["model"] not in self.models:
            return 404, {"error": {"message": f"The model {body['model']} does not exist."}}
        else:
            return 200, self.change({"choices": self._completions(body)})
        return 200, {}

    @torch.no_grad()
    def _completions(self, asked: dict[str, Any]) -> list[dict[str, Any]]:
        model, prompt = self.models[asked["model"]], asked["prompt"]
        torch.manual_seed(asked["seed"])
        return [self._complete(model, prompt, i, asked) for i in range(asked["n"])]

    def _complete(self, model: Any, prompt: list[int], index: int, asked: dict[str, Any]) -> dict[str, Any]:
        ids, logprobs, is_over = list[int](), list[float](), False
        while len(ids) < asked["max_tokens"] and not is_over:
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0, -1]
            logps = logits.div(asked["temperature"]).log_softmax(-1)
            ids.append(int(torch.multinomial(logps.exp(), 1)))
            logprobs.append(float(logps[ids[-1]]))
            is_over = ids[-1] in asked["stop_token_ids"]
        return {
            "index": index, "text": "", "token_ids": ids, "logprobs": {"token_logprobs": logprobs},
            "finish_reason": "stop" if is_over else "length",
        }  # fmt: skip


@contextmanager
def serve_engine(base: Path) -> Iterator[tuple[str, EngineState]]:
    """-> the address, and what the server holds."""
    state = EngineState(base)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_POST(self) -> None:
            with state.lock:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                if state.key and self.headers["authorization"] != f"Bearer {state.key}":
                    code, said = 401, {"error": "Unauthorized"}  # as vLLM's
                else:
                    code, said = state.answer(self.path, body)
            if state.lose:
                state.lose -= 1
                self.close_connection = True
                return self.connection.shutdown(socket.SHUT_RDWR)
            reply = json.dumps(said).encode()
            self.send_response(code)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

    with serve(Handler) as address:
        yield address, state
