"""Uses a vLLM server (or a server with the same API) as an actor's engine.

    load      adapter files in a folder ──▶ POST /v1/load_lora_adapter {lora_name, lora_path} ──▶ unload the one before
    sample    POST /v1/completions {prompt: ids, return_token_ids, logprobs: 0} ──▶ choices[i].token_ids,
                                                                                    choices[i].logprobs.token_logprobs

    VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve BASE --enable-lora --logprobs-mode processed_logprobs

The server reads the adapter's folder itself, so it runs on the actor's machine, or shares its disk.  The server's
log-probs include the temperature only with `processed_logprobs`; otherwise a replica doubts rollouts at another
temperature than 1 (fleet.check_rollouts).

If a server is down, busy (429) or broken (5xx), we repeat a request, with pauses of PATIENCE_S seconds in all; a pause
is the server's Retry-After, or PAUSE_S.  After ANSWER_S of silence, we repeat it once.  Each try to load an adapter has
a new name: the server may have loaded the adapter before its reply was lost.  A server that was started again answers
404, and then gets the adapter again.  If VLLM_API_KEY is set here, too, each request has it as its key.
"""

import itertools
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx
import safetensors.torch
from torch import Tensor

from inner.errors import InnerError
from inner.extras.engines.sampling import DrawSettings, Sampled, adapter_tensors
from inner.network import network_words

PATIENCE_S, PAUSE_S = 60.0, 2.0  # seconds of pauses in all, for a server that is down; seconds between two tries
ANSWER_S = 600.0  # time limit of one request for completions
SHOWN = 300  # characters of an answer in an error


class AdapterServer:
    """A server at `address`.   config: PEFT's config of the adapter.   folder: gets the adapter files.

    patience_s: seconds of pauses between tries while the server is busy or down.   sleep: waits seconds.
    """

    name, together = "openai", 16

    def __init__(
        self,
        address: str,
        config: Any,
        *,
        name: str,
        folder: Path,
        patience_s: float = PATIENCE_S,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._address = _checked(address).rstrip("/").removesuffix("/v1")
        self._config = config
        self._prefix = f"{name}-{secrets.token_hex(4)}"
        self._folder = folder
        self._patience_s = patience_s
        self._sleep = sleep
        self._numbers = itertools.count(1)  # of names, also for a folder that is loaded again
        self._model = ""
        self._files: Path | None = None  # files of the adapter that samples

    def load(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Write the adapter's files, and let the server load them."""
        folder = self._folder / f"{self._prefix}-{next(self._numbers)}"
        self._config.save_pretrained(folder)
        safetensors.torch.save_file(adapter_tensors(parameters), folder / "adapter_model.safetensors")
        self._serve(folder)
        if self._files is not None:
            shutil.rmtree(self._files, ignore_errors=True)
        self._files = folder

    def _serve(self, folder: Path) -> None:
        """Let the server load the adapter in this folder, and unload the previous adapter."""
        asked = list[str]()

        def body() -> dict[str, Any]:
            asked.append(f"{self._prefix}-{next(self._numbers)}")
            return {"lora_name": asked[-1], "lora_path": str(folder.resolve())}

        said = self._post("/v1/load_lora_adapter", body)
        if said.status_code != 500:  # 500 may also mean that the server cannot load this adapter
            self._check_answer(said, "load an adapter")
        if said.is_error:
            raise InnerError(
                f"{self._address} does not load the adapter in {folder} ({_shown(said)}). Start it on this machine "
                "with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora, and --max-lora-rank of at least "
                f"{self._config.r}"
            )
        for name in [self._model, *asked[:-1]] if self._model else asked[:-1]:  # an adapter that stays takes memory
            self._post("/v1/unload_lora_adapter", lambda name=name: {"lora_name": name})
        self._model = asked[-1]

    def sample(self, prompt: Sequence[int], n: int, settings: DrawSettings) -> Sampled:
        asked = {
            "prompt": list(prompt), "n": n, "max_tokens": settings.most,
            "temperature": settings.temperature, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
            "stop_token_ids": sorted(settings.ends), "ignore_eos": True,  # its model may name other stop tokens
            "seed": settings.seed, "logprobs": 0, "return_token_ids": True,
        }  # fmt: skip
        said = self._post("/v1/completions", lambda: {"model": self._model, **asked})
        if said.status_code == 404 and self._files is not None:  # the server was started again
            self._serve(self._files)
            said = self._post("/v1/completions", lambda: {"model": self._model, **asked})
        self._check_answer(said, "sample")
        try:
            choices = sorted(said.json()["choices"], key=lambda choice: choice["index"])
            if len(choices) != n:
                raise ValueError(f"{len(choices)} completions of {n}")
            read = [_read_choice(choice, settings) for choice in choices]
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise InnerError(
                f"{self._address} gave no completions with token ids and log-probs: {error} ({_shown(said)}). An actor "
                "needs `return_token_ids` and `logprobs` of /v1/completions, as vLLM has them"
            ) from error
        return [ids for ids, _ in read], [logprobs for _, logprobs in read]

    def _post(self, path: str, body: Callable[[], dict[str, Any]]) -> httpx.Response:
        """Return the server's answer, or its last refusal if it stays busy.  Raises InnerError without one.

        body: called before each try."""
        found, left = list[httpx.Response | Exception](), self._patience_s
        while sum(isinstance(one, httpx.ReadTimeout) for one in found) < 2:
            if found:
                if (pause := _pause_after(found[-1], left)) > left:
                    break
                self._sleep(pause)
                left -= pause
            try:
                said = httpx.post(
                    self._address + path, json=body(), headers=_key(), timeout=httpx.Timeout(10.0, read=ANSWER_S)
                )
            except httpx.RequestError as error:  # also an answer that cannot be decompressed
                found.append(error)
                continue
            if not _is_unable(said):
                return said
            found.append(said)
        if isinstance(found[-1], httpx.Response):
            return found[-1]
        fault = "sent unreadable answers" if isinstance(found[-1], httpx.DecodingError) else "did not answer"
        why = f"{type(found[-1]).__name__}: {network_words(found[-1])}"
        raise InnerError(
            f"{self._address} {fault} {len(found)} times ({why}). Start the server, and then this actor again"
        )

    def _check_answer(self, said: httpx.Response, asked: str) -> None:
        """Raise InnerError if the server stayed busy or broken, wants a key, or does not sample."""
        if _is_unable(said):
            advice = "Look at its log, give it less work if it is busy, and then start this actor again"
            raise InnerError(
                f"{self._address} refused to {asked} for {self._patience_s:.0f} s ({_shown(said)}). {advice}"
            )
        if said.status_code in (401, 403):
            key = "another key than VLLM_API_KEY has here" if _key() else "a key"
            raise InnerError(
                f"{self._address} refused to {asked} ({_shown(said)}): it wants {key}. Set VLLM_API_KEY to the key of "
                "the server, and then start this actor again"
            )
        if asked == "sample" and not said.is_success:
            raise InnerError(
                f"{self._address} refused to {asked} ({_shown(said)}). Mend the cause that the server names, and then "
                "start this actor again"
            )


def _key() -> dict[str, str]:
    key = os.environ.get("VLLM_API_KEY", "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _checked(address: str) -> str:
    """Return the address.   Raise InnerError unless it is one of HTTP with a host."""
    try:
        url = httpx.URL(address)
        is_one = url.scheme in ("http", "https") and url.host and 0 <= (url.port or 0) < 2**16
        fault = "" if is_one else "it needs http:// or https://, a host, and a port up to 65535"
    except (httpx.InvalidURL, UnicodeError) as error:  # UnicodeError: idna cannot read the host
        fault = str(error)
    if fault:
        raise InnerError(
            f"the address of the engine openai, {address!r}, is not the URL of a server: {fault}. Write it as in "
            "openai:http://localhost:8000/v1"
        )
    return address


def _is_unable(said: httpx.Response) -> bool:
    """Whether the server is busy or broken, and may answer later."""
    return said.status_code == 429 or said.status_code >= 500


def _pause_after(last: httpx.Response | Exception, left: float) -> float:
    """Return the seconds until the next try: the server's Retry-After if it is a number up to `left`, else PAUSE_S."""
    asked = last.headers.get("Retry-After", "") if isinstance(last, httpx.Response) else ""
    return max(PAUSE_S, float(asked)) if asked.isdecimal() and float(asked) <= left else PAUSE_S


def _read_choice(choice: Any, settings: DrawSettings) -> tuple[list[int], list[float]]:
    """Return ids and log-probs of one completion.   Raise ValueError, LookupError, TypeError or OverflowError."""
    ids, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
    if not ids or len(ids) != len(logprobs):
        raise ValueError(f"{len(ids or ())} token ids and {len(logprobs)} log-probs")
    if not all(type(token) is int for token in ids):
        raise ValueError("token ids that are not whole numbers")
    numbers = [float(logprob) for logprob in logprobs]
    if not all(-1e9 < number < 1e-3 for number in numbers):  # the same limits as in inner/rollouts/recording/drift.py
        raise ValueError("log-probs that are no numbers or above 0")
    _check_end(ids, choice["finish_reason"], settings)
    return ids, numbers


def _check_end(ids: Sequence[int], reason: Any, settings: DrawSettings) -> None:
    """Raise ValueError unless a completion ended by itself or at its limit: we train on no cut-off completion."""
    if reason == "stop" and ids[-1] not in settings.ends:
        raise ValueError("the token that ended a completion is left out")
    ended = len(ids) <= settings.most if reason == "stop" else (reason, len(ids)) == ("length", settings.most)
    if not ended:
        raise ValueError(
            f"a completion of {len(ids)} tokens ended by {reason!r}, and its limit is {settings.most}; the server's "
            "own limit (--max-model-len) may be too small"
        )


def _shown(said: httpx.Response) -> str:
    return f"HTTP {said.status_code}: {said.text[:SHOWN]}"
