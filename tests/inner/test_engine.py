"""vLLM as the engine of generations, with a stand-in: what is sent to it, how it is made, what is logged of it."""

import hashlib
import os
import socket
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from diloco.run.config import RunConfig
from inner import InnerConfig, InnerError, Seeds, build_inner, publish_model
from inner.rollouts import engine
from inner.rollouts.engine import ENOUGH, MaskedShare, engine_parameters, masked_share
from inner.train.grpo import trainer_arguments
from tests.inner.test_grpo import after
from tests.support.fake_vllm import FakeLLM, fake_vllm
from tests.support.tables import merge_tables

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
R, ALPHA = 4, 8.0
SETTINGS: dict[str, Any] = {
    "toolworld": {"kinds": 2, "names": 4, "warm_start_steps": 1}, "batch_size": 8, "lr": 1e-2, "vllm": {},
    "sampling": {"max_completion_length": 8},
}  # fmt: skip
LORA = {"lora": {"r": R, "alpha": ALPHA}}
FOLDER = tempfile.TemporaryDirectory(prefix="test-inner-")


@cache
def start() -> Path:
    """A start model with an adapter beside it; training of the whole model leaves that alone."""
    publish_model(InnerConfig(**merge_tables(SETTINGS, LORA)), Path(FOLDER.name))
    return Path(FOLDER.name)


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    return fake_vllm(monkeypatch)


def build(noise: int = 3, **settings: Any) -> Any:
    return build_inner(InnerConfig(**merge_tables(SETTINGS, settings)), start(), {}, Seeds(data=0, noise=noise))


def base_digest(model: Any) -> str:
    found = hashlib.sha256()
    for name, p in model.named_parameters():
        if "lora_" not in name:
            found.update(p.detach().numpy().tobytes())
    return found.hexdigest()


def merged_by_hand(model: Any) -> dict[str, torch.Tensor]:
    """W + α/r B A, by the names of the base's files."""
    values = {n.removeprefix("base_model.model."): p.detach().clone() for n, p in model.named_parameters()}
    plain = {n.replace(".base_layer", ""): v for n, v in values.items() if "lora_" not in n}
    for name in [n for n in values if n.endswith(".base_layer.weight")]:
        stem = name.removesuffix(".base_layer.weight")
        a, b = (values[f"{stem}.lora_{factor}.default.weight"] for factor in "AB")
        plain[f"{stem}.weight"] += ALPHA / R * b @ a
    return plain


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7, msg=name)


# ---------------------------------------------------------------------- what is sent


@pytest.mark.slow
def test_with_lora_the_engine_gets_merged_copies_and_the_base_keeps_its_bits(engines: list[FakeLLM]) -> None:
    loop = build(**LORA, sampling={"max_completion_length": 2, "max_tool_calling_iterations": 0})
    base = base_digest(loop.model)
    expected: list[dict[str, torch.Tensor]] = []

    def rewrite(*_: Any) -> None:  # as an outer step does
        with torch.no_grad():
            for p in loop.model.parameters():
                p.add_(0.01 * torch.randn_like(p) * p.requires_grad)
        expected.append(merged_by_hand(loop.model))

    loop.optimizer.register_step_post_hook(rewrite)
    loop.train(after(20))
    assert base_digest(loop.model) == base
    assert len(engines[0].loaded) == 20 == engines[0].resets
    for sent, merged in zip(engines[0].loaded[1:], expected, strict=False):
        assert_equal(sent, merged)


def test_trl_alone_would_change_the_base(engines: list[FakeLLM]) -> None:
    """The reason for sending copies; where this fails, TRL does so itself by now."""
    from trl.generation.vllm_generation import VLLMGeneration

    loop = build(**LORA)
    with torch.no_grad():
        for name, p in loop.model.named_parameters():
            if ".lora_B." in name:
                p.normal_(std=0.01)
    base = base_digest(loop.model)
    expected = merged_by_hand(loop.model)
    assert_equal({n: v.clone() for n, v in engine_parameters(loop.model)}, expected)
    assert base_digest(loop.model) == base
    sent = {n: v.clone() for n, v in VLLMGeneration._iter_named_params(loop.trainer.vllm_generation)}
    assert_equal(sent, expected)
    assert base_digest(loop.model) != base


def test_weights_that_an_outer_step_has_rewritten_are_the_engines_at_the_next_generation(
    engines: list[FakeLLM],
) -> None:
    loop = build()

    def rewrite(*_: Any) -> None:
        with torch.no_grad():
            for p in loop.model.parameters():
                p.mul_(0.5)

    loop.optimizer.register_step_post_hook(rewrite)
    loop.train(after(2))
    names = dict(loop.model.named_parameters())
    assert engines[0].loaded[-1].keys() == names.keys() and len(engines[0].loaded) == 2
    now = {n: p.detach().clone() for n, p in names.items()}
    loop.train(after(1))
    assert_equal(engines[0].loaded[2], now)


def test_an_adapter_on_a_bfloat16_base_is_added_in_float32(engines: list[FakeLLM]) -> None:
    loop = build(dtype="bfloat16", **LORA)
    assert engines[0].asked["dtype"] == "bfloat16"
    sent = dict(engine_parameters(loop.model))
    adapted = {n for n, _ in loop.model.named_parameters() if n.endswith(".base_layer.weight")}
    assert sum(value.dtype == torch.float32 for value in sent.values()) == len(adapted) > 0


def test_an_engine_that_sleeps_has_the_weights_again_when_it_generates(engines: list[FakeLLM]) -> None:
    loop = build(vllm={"sleep": True})
    assert engines[0].asked["enable_sleep_mode"]
    loop.train(after(2))
    metrics = loop.pop_metrics()
    assert metrics["engine_logp_difference_max"] < 1e-4 and metrics["completion_length"] > 0


# ---------------------------------------------------------------------- what it is made with


def test_the_dtype_is_the_trainers_and_the_noise_is_the_sessions(engines: list[FakeLLM]) -> None:
    build(noise=3)
    build(noise=4, vllm={"dtype": "bfloat16", "memory": 0.5, "max_model_length": 96})
    first, second = (engine.asked for engine in engines)
    assert (first["dtype"], first["seed"]) == ("float32", 3), "TRL would say auto, which is bfloat16, and 0"
    assert (second["dtype"], second["seed"]) == ("bfloat16", 4)
    assert (second["gpu_memory_utilization"], second["max_model_len"]) == (0.5, 96)


def test_two_replicas_of_one_machine_listen_at_ports_of_their_own(
    engines: list[FakeLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM opens a port of torch.distributed, for a group of one, some seconds after TRL has chosen it."""
    monkeypatch.setenv("MASTER_PORT", "29500")
    build()
    assert os.environ["MASTER_PORT"].isdigit() and os.environ["MASTER_PORT"] != "29500"


def test_settings_arrive_at_trl() -> None:
    def arguments(**vllm: Any) -> Any:
        return trainer_arguments(InnerConfig(vllm=vllm), Seeds(data=0, noise=0), FOLDER.name)

    usual, asked, off = arguments(), arguments(importance_mode="token_truncate", importance_clip=2.0, sleep=True), None
    off = arguments(importance_mode="off")
    assert usual.use_vllm and usual.vllm_mode == "colocate" and usual.vllm_importance_sampling_correction
    assert (usual.vllm_importance_sampling_mode, usual.vllm_importance_sampling_clip_max) == ("sequence_mask", 3.0)
    assert (asked.vllm_importance_sampling_mode, asked.vllm_importance_sampling_clip_max) == ("token_truncate", 2.0)
    assert asked.vllm_enable_sleep_mode and not usual.vllm_enable_sleep_mode
    assert not off.vllm_importance_sampling_correction
    assert not trainer_arguments(InnerConfig(), Seeds(data=0, noise=0), FOLDER.name).use_vllm


def test_run_json_says_the_engines_dtype_and_memory_is_no_mathematics() -> None:
    def run(**vllm: Any) -> RunConfig:
        return RunConfig.from_dict({"inner": {"vllm": vllm}})

    assert run().to_dict()["inner"]["vllm"]["dtype"] == "float32"
    assert run().mathematics()["inner"]["vllm"]["dtype"] == "float32"
    assert run().mathematics() == run(dtype="float32", memory=0.6, sleep=True).mathematics()
    assert run().mathematics() != run(dtype="bfloat16").mathematics()
    assert RunConfig.from_dict(run().to_dict()).mathematics() == run().mathematics()
    bfloat16 = RunConfig.from_dict({"inner": {"dtype": "bfloat16", "vllm": {}}})
    assert bfloat16.to_dict()["inner"]["vllm"]["dtype"] == "bfloat16"
    assert RunConfig.from_dict({"inner": {}}).mathematics()["inner"]["vllm"] is None


# ---------------------------------------------------------------------- evaluation


def test_held_out_prompts_are_scored_with_the_engine_and_training_goes_on_with_its_own_weights(
    engines: list[FakeLLM],
) -> None:
    loop = build(**LORA, sampling={"max_completion_length": 3, "max_tool_calling_iterations": 0})
    committed = {n: p.detach().clone() for n, p in loop.model.named_parameters() if p.requires_grad}
    loop.follow(lambda: 0, lambda: committed.items(), lambda: 1)
    loop.train(after(1))
    rows = [dict(loop.trainer.train_dataset[i]) for i in range(4)]
    live = merged_by_hand(loop.model)
    scores = [loop.score(rows, greedy=greedy, seed=1)["reward"] for greedy in (True, False, False)]
    assert len(scores[0]) == 4 and scores[1] == scores[2]
    assert 0.0 in engines[0].temperatures and 1.0 in engines[0].temperatures
    at_theta = engines[0].loaded[-1]
    assert_equal(at_theta, engines[0].loaded[0])
    loop.train(after(1))
    assert_equal(engines[0].loaded[-1], live)


# ---------------------------------------------------------------------- importance weights


class Listener:
    def __init__(self) -> None:
        self.said: list[str] = []

    def note(self, text: str) -> None: ...

    def pause(self, seconds: float) -> None: ...

    def emit(self, event: str, text: str, **fields: Any) -> None:
        self.said += [text] if event == "warning" else []


@pytest.mark.slow
def test_ratios_are_in_the_log_and_a_large_share_without_weight_warns_once(engines: list[FakeLLM]) -> None:
    loop = build()
    loop.report_to(host := Listener())
    loop.train(after(2))
    exact = loop.pop_metrics()
    assert exact["engine_logp_difference"] < 1e-5 and exact["importance_masked"] == 0
    assert exact["importance_ratio_min"] == pytest.approx(1, abs=1e-4)
    assert exact["importance_ratio"] == pytest.approx(exact["importance_ratio_max"], abs=1e-4)
    engines[0].drift = -2.0  # to the trainer each token is e² times as likely
    loop.train(after(1 + 2 * ENOUGH // 8))
    drifted = loop.pop_metrics()
    assert drifted["engine_logp_difference"] == pytest.approx(2.0, abs=1e-4)
    assert drifted["importance_masked"] == 1 and drifted["importance_ratio_max"] == 0
    assert len(host.said) == 1 and "\n" not in host.said[0]
    assert "completions (token_mask: tokens) teach nothing" in host.said[0]
    assert "more than 3 times as likely" in host.said[0]
    assert "Set" not in host.said[0] and "set inner.vllm.dtype to inner.dtype" in host.said[0]


def test_a_share_is_judged_over_enough_sequences() -> None:
    host = Listener()
    share = MaskedShare(clip=3.0)
    share.note(1.0, 8, host)
    share.note(0.0, 8 * ENOUGH, host)
    assert host.said == []
    share.note(0.06, ENOUGH, host)
    share.note(1.0, ENOUGH, host)
    assert len(host.said) == 1 and host.said[0].startswith("6% of the completions")


def test_the_share_of_tokens_counts_those_that_the_model_wrote() -> None:
    ratio = torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    batch = {"importance_sampling_ratio": ratio, "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    assert masked_share(batch) == pytest.approx(2 / 4)
    assert masked_share({**batch, "tool_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}) == pytest.approx(1 / 3)
    assert masked_share({**batch, "importance_sampling_ratio": torch.tensor([[0.0], [1.0]])}) == 0.5


# ---------------------------------------------------------------------- what cannot work


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"vllm": {"memory": 1.5}}, r"inner\.vllm\.memory = 1\.5 must be greater than 0 and below 1"),
        (
            {"vllm": {"dtype": "float16"}},
            r"inner\.vllm\.dtype = 'float16' is not known\. Use one of: float32, bfloat16",
        ),
        ({"vllm": {"max_model_length": 0}}, r"inner\.vllm\.max_model_length = 0 must be greater than 0"),
        ({"vllm": {"importance_mode": "mask"}}, "Use one of: sequence_mask"),
        ({"vllm": {"memroy": 0.5}}, r"did you mean inner\.vllm\.memory\?"),
        (
            {"vllm": {}, "loop": "supervised", "model": "tiny", "data": {"text": "a.txt"}},
            r'\[inner\.vllm\] generates rollouts, and inner\.loop = "supervised" makes no rollouts',
        ),
        ({"vllm": {}, "grpo": {"objective": "vespo"}}, 'takes only weights of tokens.*"token_truncate"'),
        ({"vllm": {}, "grpo": {"objective": "gmpo"}}, 'takes no importance weights.*importance_mode = "off"'),
        ({"trl": {"vllm_model_impl": "auto"}}, r"vllm_model_impl does nothing here.*Add the table \[inner\.vllm\]"),
        ({"vllm": {}, "trl": {"vllm_enable_sleep_mode": True}}, r"the run sets this itself\. Use \[inner\.vllm\]"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError, match=words):
        InnerConfig.from_dict(settings)


def test_a_loss_without_importance_weights_is_taken_without_the_correction() -> None:
    assert InnerConfig.from_dict({"vllm": {"importance_mode": "off"}, "grpo": {"objective": "gmpo"}}).vllm


def test_a_replica_without_vllm_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(InnerError, match=r"\[inner\.vllm\] asks for vLLM, which is not installed here.*constraints"):
        build()


def test_a_free_port_is_found_where_localhost_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen in a container without /etc/hosts: gaierror."""

    class Nameless(socket.socket):
        def bind(self, address: Any) -> None:
            if address[0] == "localhost":
                raise socket.gaierror("Temporary failure in name resolution")
            super().bind(address)

    monkeypatch.setattr(engine.socket, "socket", Nameless)
    assert engine.free_port() > 0
