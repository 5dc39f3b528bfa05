"""Engines of an actor: what they are told and what they tell, and each way in which one can fail."""

import atexit
import gc
import json
import math
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch

from inner.errors import InnerError
from inner.extras.engines.choose import _make, use_engine
from inner.extras.engines.llama import LlamaEngine, permuted, write_adapter
from inner.extras.engines.mlx import MlxEngine, longrope_fault, rotary_settings, window_of
from inner.extras.engines.sampling import DrawSettings, adapter_tensors, sample_with
from inner.extras.engines.server import AdapterServer
from inner.rollouts.recording.acting import Sampler
from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner, publish_model
from tests.inner.test_acting import SHARE
from tests.inner.test_toolworld import SMALL
from tests.support.engine_server import EngineState, serve_engine
from tests.support.fake_vllm import FakeLLM, fake_vllm
from tests.support.tables import merge_tables

torch.set_num_threads(1)
LORA = {"lora": {"r": 4, "targets": ["q_proj", "k_proj", "v_proj"]}, "sampling": {"temperature": 0.8}}
Served = tuple[str, EngineState]


@cache
def start() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="test-engines-")
    atexit.register(folder.cleanup)
    publish_model(InnerConfig(**merge_tables(SMALL, LORA)), Path(folder.name))
    return Path(folder.name)


def a_loop(**settings: Any) -> Any:
    config = InnerConfig(**merge_tables(merge_tables(SMALL, LORA), settings))
    return build_inner(config, start(), {}, Seeds(data=0, noise=0, share=SHARE))


def move_adapter(loop: Any, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in loop.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.3)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve_engine(start()) as found:
        yield found


@pytest.fixture
def server(served: Served) -> Iterator[Served]:
    address, state = served
    state.change, state.asked, state.busy, state.lose, state.key = (lambda answer: answer), [], 0, 0, ""
    yield address, state


def own_log_probs(loop: Any, bundle: Any) -> list[torch.Tensor]:
    """Return the log-probs of the model's tokens in each rollout, from the loop's own model."""
    found = []
    for prompt, ids, mask in zip(bundle.prompt_ids, bundle.ids, bundle.mask, strict=True):
        with torch.no_grad():
            logits = loop.model.eval()(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        logps = logits.div(loop.trainer.temperature).log_softmax(-1)[range(len(ids)), ids]
        found.append(logps[torch.tensor(mask) == 1])
    return found


def assert_behaviour(loop: Any, bundle: Any, tolerance: float = 1e-4) -> None:
    for ours, told, mask in zip(own_log_probs(loop, bundle), bundle.logprobs, bundle.mask, strict=True):
        told = torch.tensor(told)[torch.tensor(mask) == 1]
        torch.testing.assert_close(told, ours, atol=tolerance, rtol=0)


def test_a_server_samples_with_the_newest_adapter_through_the_tool_loop(server: Served, tmp_path: Path) -> None:
    address, state = server
    loop = a_loop()
    move_adapter(loop, 1)
    use_engine(f"openai:{address}/v1", loop.trainer, name="a07", folder=tmp_path)
    sampler = Sampler(loop.trainer)
    assert sampler.engine == "openai"
    made = sampler.sample(SHARE, 0)
    assert made.mask is not None and any(0 in mask for mask in made.mask), "tools were called"
    assert_behaviour(loop, made)
    move_adapter(loop, 2)
    sampler.load()
    assert_behaviour(loop, sampler.sample(SHARE, 1))
    assert len(state.models) == 1 and len(list(tmp_path.iterdir())) == 1, "the old adapter is gone"
    asked = [body for path, body in state.asked if path == "/v1/completions"]
    assert max(body["n"] for body in asked) == loop.trainer.args.num_generations
    assert all(body["temperature"] == 0.8 and body["return_token_ids"] for body in asked)
    assert len({body["seed"] for body in asked}) == len(asked)
    ends = sorted(loop.trainer._settings(0).ends)
    assert all(body["stop_token_ids"] == ends and body["ignore_eos"] for body in asked), "the run's stop tokens alone"


def without(*path: str) -> Callable[[dict[str, Any]], Any]:
    def change(answer: dict[str, Any]) -> Any:
        for choice in answer["choices"]:
            at = choice
            for name in path[:-1]:
                at = at[name]
            del at[path[-1]]
        return answer

    return change


def setting(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda answer: {"choices": [{**choice, **values} for choice in answer["choices"]]}


def a_server_engine(address: str, folder: Path, **named: Any) -> tuple[Any, Any]:
    loop = a_loop()
    return loop, AdapterServer(address, loop.model.peft_config["default"], name="a07", folder=folder, **named)


@pytest.fixture(scope="module")
def loaded(served: Served, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An engine with its adapter: what an answer lacks does not change it."""
    loop, engine = a_server_engine(served[0], tmp_path_factory.mktemp("loaded"))
    engine.load(loop.model.named_parameters())
    return engine


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("token_ids"), "'token_ids'"),
        (setting(token_ids=None), "0 token ids"),
        (without("logprobs"), "'logprobs'"),
        (setting(logprobs=None), "NoneType"),
        (setting(token_ids=["token_id:5"], logprobs={"token_logprobs": [-1.0]}), "not whole numbers"),
        (setting(token_ids=[5, 6]), "2 token ids and"),
        (setting(token_ids=[5], logprobs={"token_logprobs": [-1.0]}, finish_reason="stop"), "ended a completion"),
        (setting(token_ids=[5], logprobs={"token_logprobs": [None]}, finish_reason="length"), "float"),
        *(
            (setting(token_ids=[5, 9], logprobs={"token_logprobs": [-1.0, odd]}), "no numbers or above 0")
            for odd in (math.nan, -math.inf, 3.0)
        ),
        (setting(finish_reason="abort"), "ended by 'abort'"),
        (setting(finish_reason=None), "ended by None"),
        (
            setting(token_ids=[5], logprobs={"token_logprobs": [-1.0]}, finish_reason="length"),
            "of 1 tokens .* limit is 3",
        ),
        (setting(token_ids=[5] * 4, logprobs={"token_logprobs": [-1.0] * 4}, finish_reason="length"), "of 4 tokens"),
        (setting(token_ids=[5, 5, 5, 9], logprobs={"token_logprobs": [-1.0] * 4}, finish_reason="stop"), "of 4 tokens"),
        (lambda answer: {"choices": answer["choices"][:1]}, "1 completions of 2"),
        (lambda answer: {"error": "no"}, "'choices'"),
        (lambda answer: [], "list indices"),
    ],
)
def test_answers_without_ids_or_log_probs_end_the_actor_with_a_sentence(
    server: Served, loaded: Any, change: Any, words: str
) -> None:
    engine, (_, state) = loaded, server
    state.change = change
    with pytest.raises(InnerError, match=f"(?s){words}.*An actor needs `return_token_ids`"):
        engine.sample([1, 2, 3], 2, DrawSettings(1.0, 3, frozenset({9}), 7))


@pytest.mark.parametrize("token", [-5, 100_000, 2**70])
def test_a_token_of_another_model_is_told_and_makes_no_bundle(token: int) -> None:
    class Other:
        name, together = "openai", 1

        def load(self, parameters: Any) -> None: ...

        def sample(self, prompt: Any, n: int, settings: DrawSettings) -> Any:
            return [[token, *settings.ends]] * n, [[-1.0, -0.1]] * n

    loop = a_loop()
    sample_with(loop.trainer, Other())
    with pytest.raises(InnerError, match=rf"the engine sampled the token {token}, and the run's model has \d+ tokens"):
        Sampler(loop.trainer).sample(SHARE, 0)


def test_an_adapter_that_the_server_does_not_load_is_told_with_the_flags_that_it_needs(
    server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address, state = server
    loop, engine = a_server_engine(address, tmp_path)
    monkeypatch.setattr(state, "answer", lambda path, body: (404, {"detail": "Not Found"}))
    with pytest.raises(InnerError, match=r"HTTP 404.*--enable-lora"):
        engine.load(loop.model.named_parameters())


def test_a_server_that_is_down_is_asked_again_and_then_the_actor_ends(tmp_path: Path) -> None:
    waited = list[float]()
    loop, engine = a_server_engine("http://127.0.0.1:9", tmp_path, patience_s=6.0, sleep=waited.append)
    with pytest.raises(InnerError, match=r"did not answer 4 times.*Start the server"):
        engine.load(loop.model.named_parameters())
    assert waited == [2.0] * 3


@pytest.mark.slow
def test_a_busy_server_is_asked_again_and_a_lost_answer_leaves_no_adapter(server: Served, tmp_path: Path) -> None:
    address, state = server
    waited = list[float]()
    loop, engine = a_server_engine(address, tmp_path, patience_s=6.0, sleep=waited.append)
    state.models.clear()
    state.busy, state.lose = 2, 3
    engine.load(loop.model.named_parameters())
    assert waited == [2.0] * 3 and len(state.models) == 1, "two busy answers, which are lost, too, and a lost load"
    state.busy = 2
    ids, _ = engine.sample([1, 2, 3], 2, DrawSettings(1.0, 3, frozenset(), 7))
    assert len(ids) == 2 and waited == [2.0] * 5
    state.busy = 99
    with pytest.raises(InnerError, match=r"refused to load an adapter for 6 s \(HTTP 503.*Look at its log"):
        engine.load(loop.model.named_parameters())
    state.busy = 0


def test_a_server_that_was_started_again_gets_the_adapter_again(server: Served, tmp_path: Path) -> None:
    """Before: the actor ended, with advice about token ids."""
    address, state = server
    loop, engine = a_server_engine(address, tmp_path)
    engine.load(loop.model.named_parameters())
    for _ in range(2):
        state.models.clear()
        assert len(engine.sample([1, 2, 3], 2, DrawSettings(1.0, 3, frozenset(), 7))[0]) == 2
        assert len(state.models) == len(list(tmp_path.iterdir())) == 1
    engine.load(loop.model.named_parameters())
    assert len(state.models) == len(list(tmp_path.iterdir())) == 1


def test_a_server_with_a_key_gets_it(server: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address, state = server
    loop, engine = a_server_engine(address, tmp_path)
    state.key = "k3y"
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(InnerError, match=r"refused to load an adapter \(HTTP 401.*wants a key. Set VLLM_API_KEY"):
        engine.load(loop.model.named_parameters())
    monkeypatch.setenv("VLLM_API_KEY", "k3y")
    engine.load(loop.model.named_parameters())
    assert engine.sample([1, 2, 3], 1, DrawSettings(1.0, 3, frozenset(), 7))
    monkeypatch.setenv("VLLM_API_KEY", "other")
    with pytest.raises(InnerError, match=r"refused to sample \(HTTP 401.*another key than VLLM_API_KEY") as told:
        engine.sample([1], 1, DrawSettings(1.0, 3, frozenset(), 7))
    assert "other" not in str(told.value).replace("another", "")


ASKED = DrawSettings(1.0, 3, frozenset({9}), 7)


@pytest.mark.parametrize("code", [307, 400, 404])
def test_a_refusal_is_told_in_the_servers_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int) -> None:
    """Before: "gave no completions … needs `return_token_ids`"."""
    engine, waited = answering(monkeypatch, tmp_path, lambda: httpx.Response(code, text="maximum length is 8"))
    with pytest.raises(InnerError, match=rf"refused to sample \(HTTP {code}: maximum length is 8\). Mend") as told:
        engine.sample([1], 1, ASKED)
    assert "return_token_ids" not in str(told.value) and not waited


def answering(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: Callable[[], httpx.Response]
) -> tuple[AdapterServer, list[float]]:
    """Return an engine whose requests get such answers, and the list of its waits."""
    monkeypatch.setattr(httpx, "post", lambda *_, **__: answer())
    waited = list[float]()
    return AdapterServer("http://x:1", None, name="a07", folder=tmp_path, sleep=waited.append), waited


@pytest.mark.parametrize("code", [429, 500, 502, 503])
def test_a_server_that_stays_busy_or_broken_is_told_by_its_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int
) -> None:
    """Before: "gave no completions … needs `return_token_ids`"."""
    engine, waited = answering(monkeypatch, tmp_path, lambda: httpx.Response(code, text="too many"))
    with pytest.raises(InnerError, match=rf"refused to sample for 60 s \(HTTP {code}: too many\)") as told:
        engine.sample([1], 1, ASKED)
    assert "return_token_ids" not in str(told.value) and waited == [2.0] * 30


@pytest.mark.parametrize(
    ("after", "waits"),
    [("25", [25.0, 25.0, *[2.0] * 5]), ("60", [60.0]), ("0", [2.0] * 30), ("9" * 999, [2.0] * 30),
     ("Wed, 21 Oct 2026 07:28:00 GMT", [2.0] * 30), ("-4", [2.0] * 30), ("nan", [2.0] * 30)],
    ids=["25 s", "60 s", "0 s", "huge", "a date", "below 0", "nan"],
)  # fmt: skip
def test_a_small_retry_after_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, after: str, waits: list[float]
) -> None:
    engine, waited = answering(monkeypatch, tmp_path, lambda: httpx.Response(429, headers={"Retry-After": after}))
    with pytest.raises(InnerError, match="HTTP 429"):
        engine.sample([1], 1, ASKED)
    assert waited == waits


def test_answers_that_cannot_be_decompressed_or_parsed_end_the_actor_with_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before: DecodingError and RecursionError as they were."""
    torn = lambda: httpx.Response(200, headers={"Content-Encoding": "gzip"}, content=b"notgz")  # noqa: E731
    engine, waited = answering(monkeypatch, tmp_path, torn)
    with pytest.raises(InnerError, match=r"sent unreadable answers 31 times \(DecodingError"):
        engine.sample([1], 1, ASKED)
    deep = lambda: httpx.Response(200, content=b"[" * 100_000)  # noqa: E731
    engine, waited = answering(monkeypatch, tmp_path, deep)
    with pytest.raises(InnerError, match=r"gave no completions .*(recursion|overflow).*HTTP 200"):
        engine.sample([1], 1, ASKED)
    choice = b'{"index": 0, "token_ids": [9], "finish_reason": "stop", "logprobs": {"token_logprobs": [-1%s]}}'
    far = lambda: httpx.Response(200, content=b'{"choices": [%s]}' % (choice % (b"0" * 400)))  # noqa: E731
    engine, waited = answering(monkeypatch, tmp_path, far)
    with pytest.raises(InnerError, match=r"gave no completions .*too large.*HTTP 200"):
        engine.sample([1], 1, ASKED)
    assert not waited


@pytest.mark.parametrize(
    "address",
    ["localhost:8000", "localhost:8000/v1", "http://", "http://[::1", "http://127.0.0.1:99999", "ftp://x", "//x", "",
     "http://xn--.org", "http://localhost:-1"],
)  # fmt: skip
def test_an_address_that_is_no_url_of_a_server_is_refused_at_once(address: str, tmp_path: Path) -> None:
    """Before: 31 tries, or InvalidURL as it was."""
    with pytest.raises(InnerError, match=r"not the URL of a server.*openai:http://localhost:8000/v1"):
        AdapterServer(address, None, name="a07", folder=tmp_path)


def test_a_server_that_hangs_is_asked_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: Any, **__: Any) -> Any:
        raise httpx.ReadTimeout("ten minutes")

    loop, engine = a_server_engine("http://127.0.0.1:9", tmp_path, sleep=lambda seconds: None)
    monkeypatch.setattr(httpx, "post", hang)
    with pytest.raises(InnerError, match=r"did not answer 2 times \(ReadTimeout"):
        engine.load(loop.model.named_parameters())


@pytest.mark.parametrize(
    ("typed", "settings", "words"),
    [
        ("openai:http://x", {"trl": {"top_p": 0.9}}, "samples from all tokens"),
        ("llama_cpp:/no/such.gguf", {}, "llama"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_by_name(typed: str, settings: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InnerError, match=words):
        use_engine(typed, a_loop(**settings).trainer, name="a07", folder=tmp_path)


# ---------------------------------------------------------------------- vLLM in process


def test_vllm_in_process_gets_the_weights_whenever_the_actor_has_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[FakeLLM] = fake_vllm(monkeypatch)
    loop = a_loop(vllm={})
    sampler = Sampler(loop.trainer)
    assert sampler.engine == "vllm"
    move_adapter(loop, 1)
    sampler.load()
    assert_behaviour(loop, sampler.sample(SHARE, 0))
    (engine,) = engines
    pushed = engine.resets
    sampler.sample(SHARE, 1)
    assert engine.resets == pushed, "no new weights, no push"
    move_adapter(loop, 2)
    sampler.load()
    assert_behaviour(loop, sampler.sample(SHARE, 2))
    assert engine.resets == pushed + 1


# ---------------------------------------------------------------------- llama.cpp, without llama.cpp


class Sizes:
    path, architecture, blocks = Path("x.gguf"), "llama", 2
    heads = {"attn_q": 4, "attn_k": 2}  # noqa: RUF012


def test_an_adapters_file_has_llama_cpps_names_scale_and_order_of_rows(tmp_path: Path) -> None:
    stem = "base_model.model.model.layers.1.self_attn"
    tensors = {
        f"{stem}.{layer}.lora_{part}.default.weight": torch.randn(*shape)
        for layer, rows in (("q_proj", 16), ("k_proj", 8), ("v_proj", 8))
        for part, shape in (("A", (3, 16)), ("B", (rows, 3)))
    }
    named: Any = Sizes
    write_adapter(tmp_path / "a.gguf", adapter_tensors(tensors.items()), named, alpha=6.0)
    read = gguf.GGUFReader(tmp_path / "a.gguf")
    found = {t.name: t.data for t in read.tensors}
    assert sorted(found) == [f"blk.1.attn_{x}.weight.lora_{p}" for x in "kqv" for p in "ab"]
    assert read.fields["adapter.lora.alpha"].contents() == 6.0 and read.fields["general.type"].contents() == "adapter"
    b = tensors[f"{stem}.q_proj.lora_B.default.weight"].numpy()
    assert np.array_equal(found["blk.1.attn_q.weight.lora_b"][:4], b[[0, 2, 1, 3]])
    assert np.array_equal(found["blk.1.attn_v.weight.lora_b"], tensors[f"{stem}.v_proj.lora_B.default.weight"].numpy())
    with pytest.raises(InnerError, match=r"no name for .*odd.*inner.lora.targets"):
        write_adapter(tmp_path / "b.gguf", {"base_model.model.odd.lora_A.weight": torch.ones(1, 1)}, named, alpha=1.0)


def test_rows_are_permuted_as_llama_cpps_converter_does() -> None:
    rows = np.arange(12.0)[:, None]
    assert permuted(rows, 2)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


class FakeLlama:
    """llama.cpp with logits that depend on the newest token."""

    metadata: dict[str, str] = {  # noqa: RUF012
        "general.architecture": "llama", "llama.block_count": "2", "llama.attention.head_count": "4",
    }  # fmt: skip
    model = ctx = None

    def __init__(self, path: str, **asked: Any) -> None:
        if "missing" in path:
            raise ValueError(f"Model path does not exist: {path}")
        self.n_tokens, self.cache = 0, [0] * 64

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: list[int]) -> None:
        for token in tokens:
            self.cache[self.n_tokens] = token
            self.n_tokens += 1

    def n_vocab(self) -> int:
        return 8


@pytest.fixture
def llama(monkeypatch: pytest.MonkeyPatch) -> Any:
    import ctypes
    from types import SimpleNamespace

    made = list[FakeLlama]()

    def make(path: str, **asked: Any) -> FakeLlama:
        made.append(FakeLlama(path))
        return made[-1]

    def logits(ctx: Any) -> Any:
        last = made[-1].cache[made[-1].n_tokens - 1]
        return (ctypes.c_float * 8)(*(0.5 * ((last * 3 + i) % 5) for i in range(8)))

    class Module(SimpleNamespace):
        __hash__ = object.__hash__  # as a module has one

    fake = Module(
        Llama=make, llama_get_logits=logits, llama_log_callback=lambda note: note,
        llama_log_set=lambda note, _: note(4, b"it said why", None),
        llama_adapter_lora_init=lambda *_: None,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    return fake


def test_llama_cpps_draws_come_with_their_log_probs_and_end_where_they_should(llama: Any, tmp_path: Path) -> None:
    config = a_loop().model.peft_config["default"]
    engine = LlamaEngine(tmp_path / "x.gguf", config, folder=tmp_path, context=20)
    ids, logprobs = engine.sample([1, 2, 3], 300, DrawSettings(0.5, 9, frozenset([7]), seed=3))
    assert {len(row) for row in ids} >= {1, 2, 9} and all(7 not in row[:-1] for row in ids)
    assert all(len(row) == 9 or row[-1] == 7 for row in ids)
    for row, told in zip(ids, logprobs, strict=True):
        last = 3
        for token, logprob in zip(row, told, strict=True):
            expected = torch.tensor([((last * 3 + i) % 5) for i in range(8)]).float().log_softmax(-1)[token]
            assert math.isclose(logprob, float(expected), abs_tol=1e-6)
            last = token
    with pytest.raises(InnerError, match="a prompt has 20 tokens"):
        engine.sample([1] * 20, 1, DrawSettings(1.0, 9, frozenset([7]), seed=3))
    with pytest.raises(InnerError, match=r"cannot put the run's adapter on .*it said why"):
        engine.load(a_loop().model.named_parameters())


def test_llama_cpps_callback_outlives_each_engine(llama: Any, tmp_path: Path) -> None:
    """Before: it was freed with the newest engine, and llama.cpp called it when it freed the one before (a crash)."""
    heard = []
    llama.llama_log_set = lambda note, _: heard.append(weakref.ref(note))
    config = a_loop().model.peft_config["default"]
    for _ in range(2):
        LlamaEngine(tmp_path / "x.gguf", config, folder=tmp_path, context=20)
    gc.collect()
    assert [note() is not None for note in heard] == [True]


def test_files_that_are_no_base_are_refused(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = a_loop().model.peft_config["default"]
    with pytest.raises(InnerError, match=r"cannot load .*missing"):
        LlamaEngine(tmp_path / "missing.gguf", config, folder=tmp_path)
    monkeypatch.setitem(FakeLlama.metadata, "general.architecture", "mamba")
    with pytest.raises(InnerError, match="of the kind mamba"):
        LlamaEngine(tmp_path / "x.gguf", config, folder=tmp_path)


def test_without_the_package_the_next_step_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(InnerError, match="pip install llama-cpp-python"):
        LlamaEngine(tmp_path / "x.gguf", None, folder=tmp_path)


# ---------------------------------------------------------------------- MLX (the real one: test_engines_real.py)


def test_without_mlx_the_next_step_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx", None)
    with pytest.raises(InnerError, match="pip install 'mlx-lm"):
        use_engine("mlx", a_loop().trainer, name="a07", folder=Path("unused"))
    with pytest.raises(InnerError, match="pip install 'mlx-lm"):
        MlxEngine("no/folder", a_loop().model.peft_config["default"])


NEOX = {"rotary_emb_base": 1e5, "rotary_pct": 1.0}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({}, {}),
        ({"rope_theta": 5e5}, {}),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e5}}}, {}),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, {"rope_theta": 1e5, **NEOX}),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 1e5}}, NEOX),
        (
            {"rope_parameters": {"rope_theta": 1e5, "partial_rotary_factor": 0.5}},
            {"rope_theta": 1e5, "partial_rotary_factor": 0.5, "rotary_emb_base": 1e5, "rotary_pct": 0.5},
        ),
        (
            {"rope_parameters": {"rope_theta": 1e5, "rope_type": "yarn", "factor": 4.0}},
            {
                **{"rope_theta": 1e5, **NEOX},
                "rope_scaling": {"rope_theta": 1e5, "type": "yarn", "rope_type": "yarn", "factor": 4.0},
            },
        ),
    ],
)
def test_mlx_is_told_the_rotary_settings_that_transformers_5_writes_under_another_name(
    tmp_path: Path, config: Any, told: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert rotary_settings(tmp_path) == told


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({}, math.inf),
        ({"sliding_window": None}, math.inf),
        ({"sliding_window": 4096}, 4096),
        ({"sliding_window": 4096, "use_sliding_window": False}, math.inf),
    ],
)
def test_a_sliding_window_bounds_what_mlx_may_sample(config: Any, window: float) -> None:
    assert window_of(config) == window


@pytest.mark.parametrize(
    "told",
    [
        {"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 4096},
        {"rope_scaling": {"type": "su"}},
        {"rope_scaling": {"type": "yarn", "short_factor": [1.0], "long_factor": [2.0]}},  # Phi-3's is longrope
        {"rope_scaling": {"type": "longrope"}, "max_position_embeddings": None},
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 4096}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default"},
                "full_attention": {"rope_type": "longrope"},
            }
        },
        {"text_config": {"rope_parameters": {"rope_type": "longrope"}}},
    ],
)
def test_longrope_is_refused_however_a_config_spells_it(told: Any) -> None:
    """Before: only the types longrope at the top, and only beyond the original length."""
    refused = longrope_fault({"max_position_embeddings": 131072, "original_max_position_embeddings": 4096, **told})
    assert "MLX always takes the long factors" in refused


@pytest.mark.parametrize("rope", [None, {"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}])
def test_other_rotary_angles_are_taken(rope: Any) -> None:
    assert longrope_fault({"rope_parameters": rope, "text_config": {"rope_scaling": rope}}) == ""


def test_a_kind_without_a_class_is_no_llama(tmp_path: Path) -> None:
    """Before: an engine whose name stands in the core's list alone read its address as a .gguf file."""
    model = SimpleNamespace(peft_config={"default": None})
    with pytest.raises(InnerError, match="the engine 'sglang' has no class here"):
        _make("sglang", "http://127.0.0.1:1", model, name="a00", folder=tmp_path)
