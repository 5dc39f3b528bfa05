"""The parts that a start model brings along: its generation config, absolute positions, a router, towers."""

import copy
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BartForCausalLM,
    CTRLConfig,
    CTRLLMHeadModel,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MambaConfig,
    MambaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)
from trl.trainer import grpo_trainer

from inner.models.causal_lm import number_positions, sample_as_asked
from inner.models.known import PAD_READERS, ask_hub, known_model, refuse_pad_reader, refuse_towers
from inner.settings.inner import InnerConfig, InnerError
from tests.inner import test_trainer
from tests.inner.test_broken_policy import train_toy
from tests.inner.test_scoring import ROWS, build
from tests.inner.test_toolworld import small_folder
from tests.inner.test_trainer import make, rollouts

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
LEAKS = {
    "beams": {"num_beams": 4},
    "no repeats": {"no_repeat_ngram_size": 1},
    "a least length": {"min_new_tokens": 8},
    "cut-offs": {"epsilon_cutoff": 0.4, "eta_cutoff": 0.4, "typical_p": 0.2},
    "words": {"suppress_tokens": list(range(5, 40)), "stop_strings": ["7"]},
}

# -------------------------------------------------------------------- sampling


def leaky_folder(folder: Path, **settings: Any) -> Path:
    shutil.copytree(small_folder(), folder)
    config = GenerationConfig.from_pretrained(folder)
    config.update(**settings)
    (folder / "generation_config.json").write_text(json.dumps(config.to_dict(), default=str))
    return folder


@pytest.mark.quick(3)
@pytest.mark.parametrize("leak", LEAKS)
def test_rollouts_and_evaluation_are_sampled_as_the_run_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leak: str
) -> None:
    expected = rollouts(make())["completion_ids"], build().score(ROWS, greedy=False, seed=0)
    folder = leaky_folder(tmp_path / "model", **LEAKS[leak])
    assert AutoModelForCausalLM.from_pretrained(folder).generation_config.to_diff_dict().items() >= LEAKS[leak].items()
    monkeypatch.setattr(test_trainer, "small_folder", lambda: folder)
    monkeypatch.setattr("tests.inner.test_grpo.small_folder", lambda: folder)
    trainer = make()
    assert torch.equal(rollouts(trainer)["completion_ids"], expected[0])
    assert build().score(ROWS, greedy=False, seed=0) == expected[1]


def test_only_special_tokens_are_left_of_a_models_generation_config() -> None:
    model = tiny(Qwen2ForCausalLM, Qwen2Config)
    model.generation_config = GenerationConfig(eos_token_id=[3, 5], bos_token_id=1, pad_token_id=0, **LEAKS["beams"])
    sample_as_asked(model)
    assert set(model.generation_config.to_diff_dict()) <= {
        "eos_token_id", "bos_token_id", "pad_token_id", "transformers_version",
    }  # fmt: skip
    assert model.generation_config.eos_token_id == [3, 5]


def test_stop_strings_are_refused_in_words() -> None:
    with pytest.raises(InnerError, match=r"inner\.trl\.generation_kwargs has stop_strings, .* vLLM's own name is stop"):
        InnerConfig(trl={"generation_kwargs": {"stop_strings": ["\n"]}})
    with pytest.raises(InnerError, match="stop_strings"):
        InnerConfig(trl={"generation_kwargs": '{"stop_strings": "x"}'})


# -------------------------------------------------------------------- positions


def tiny(cls: Any, config: Any, **more: Any) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "max_position_embeddings": 40, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, **more,
    }  # fmt: skip
    return cls(config(**sizes)).eval()


@pytest.mark.parametrize(("cls", "config"), [(GPT2LMHeadModel, GPT2Config), (OPTForCausalLM, OPTConfig)])
def test_a_padded_row_has_the_log_probs_of_the_row_alone(cls: Any, config: Any) -> None:
    more = {"word_embed_proj_dim": 16} if config is OPTConfig else {}
    model = tiny(cls, config, initializer_range=1.0, init_std=1.0, **more)
    row, pad = torch.arange(5, 12)[None], torch.zeros(1, 6, dtype=torch.long)
    padded, mask = torch.cat([pad, row], 1), torch.tensor([[0] * 6 + [1] * 7])
    alone = model(row).logits.log_softmax(-1)
    before = model(padded, attention_mask=mask).logits[:, 6:].log_softmax(-1)
    number_positions(model)
    number_positions(model)
    after = model(padded, attention_mask=mask).logits[:, 6:].log_softmax(-1)
    assert torch.allclose(after, alone, atol=1e-4)
    assert config is OPTConfig or (before - alone).abs().max() > 0.1, "else this test shows nothing"
    sampled = {"max_new_tokens": 5, "do_sample": False}
    more_padded = model.generate(padded, attention_mask=mask, **sampled)[:, 13:]
    assert torch.equal(more_padded, model.generate(row, attention_mask=torch.ones_like(row), **sampled)[:, 7:])


def test_rotary_models_are_left_alone() -> None:
    model = tiny(Qwen2ForCausalLM, Qwen2Config, intermediate_size=16, num_key_value_heads=2)
    number_positions(model)
    assert not model.base_model._forward_pre_hooks


def test_absolute_positions_that_cannot_be_passed_are_refused() -> None:
    config = BartConfig(vocab_size=64, d_model=16, decoder_layers=1, decoder_attention_heads=2, decoder_ffn_dim=16)
    with pytest.raises(InnerError, match="BartForCausalLM, with absolute positions and no position_ids"):
        number_positions(BartForCausalLM(config))


PADDED: list[tuple[Any, Any, dict[str, Any]]] = [
    (RecurrentGemmaForCausalLM, RecurrentGemmaConfig, {"lru_width": 16, "block_types": ["recurrent", "attention"]}),
    (RwkvForCausalLM, RwkvConfig, {"attention_hidden_size": 16}),
    (CTRLLMHeadModel, CTRLConfig, {"dff": 16}),
    (GPT2LMHeadModel, GPT2Config, {}),
    (Qwen2ForCausalLM, Qwen2Config, {"intermediate_size": 16, "num_key_value_heads": 2}),
    (MambaForCausalLM, MambaConfig, {"state_size": 4}),
]


@pytest.mark.parametrize(("cls", "config", "more"), PADDED)
def test_a_model_that_reads_the_padding_in_front_of_a_row_is_refused(cls: Any, config: Any, more: Any) -> None:
    """Before: the run trained another policy than the one sampled."""
    model = tiny(cls, config, **{"num_hidden_layers": 2} | more)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    number_positions(model)
    row, padding = torch.arange(1, 9)[None], torch.zeros(1, 6, dtype=torch.int64)
    mask = torch.cat([padding, torch.ones_like(row)], dim=1)
    with torch.no_grad():
        padded = model(input_ids=torch.cat([padding, row], dim=1), attention_mask=mask).logits[:, 6:]
        off = (padded - model(input_ids=row, attention_mask=torch.ones_like(row)).logits).abs().max()
    with nullcontext() if off < 1e-3 else pytest.raises(InnerError, match="depends on the padding in front"):
        refuse_pad_reader(model.config.to_dict(), InnerConfig())
    assert (off > 0.05) == (model.config.model_type in PAD_READERS)


def test_a_folder_with_such_a_model_is_refused_before_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    with pytest.raises(InnerError, match="is a rwkv model"):
        known_model(InnerConfig(model=str(folder), data={"prompts": "p.jsonl"}, rewards={"functions": {"r.py:f": 1.0}}))
    known_model(InnerConfig(model=str(folder), loop="supervised", data={"text": "t.txt"}))


def test_a_trainer_scores_the_policy_that_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log-probs of TRL's loss are those under which `generate` has drawn."""
    gpt = tiny(GPT2LMHeadModel, GPT2Config, vocab_size=len(make().processing_class), max_position_embeddings=128)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda folder: gpt)
    monkeypatch.setattr(grpo_trainer, "create_model_from_path", lambda path, **options: copy.deepcopy(gpt))
    trainer = make(config={"trl": {"beta": 0.1}})
    row, width = torch.arange(5, 17)[None], 6
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), row], 1)
    mask = torch.tensor([[0] * 7 + [1] * 12])
    alone, _, _ = trainer._get_per_token_logps_and_entropies(trainer.model, row, torch.ones_like(row), width)
    for model in (trainer.model, trainer.ref_model):  # equal weights: the KL term is 0
        found, _, _ = trainer._get_per_token_logps_and_entropies(model, padded, mask, width)
        assert torch.allclose(found, alone, atol=1e-5)


# -------------------------------------------------------------------- a router


def test_the_policy_loss_of_a_mixture_of_experts_has_its_routers_loss_beside_it() -> None:
    sizes = {"intermediate_size": 16, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "decoder_sparse_step": 1}
    router = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = tiny(Qwen3MoeForCausalLM, Qwen3MoeConfig, **sizes, **heads, **router)
    _, found = train_toy("worst", steps=2, model=model)
    assert found["loss/router"][0] > 0.4 and abs(found["loss/grpo"][0]) < 1e-5, "on-policy its value is 0"
    for total, grpo, router in zip(*(found[f"loss/{n}"] for n in ("total", "grpo", "router")), strict=True):
        assert total == pytest.approx(grpo + router, abs=1e-6)


LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 16, "num_key_value_heads": 2}
HYBRID = {"layer_types": ["attention"], "shared_intermediate_size": 16, "mamba_n_heads": 4, "mamba_d_head": 8}


INT_LOSS = pytest.mark.xfail(
    transformers.__version__ == "5.17.0", reason="vLLM's version returns this model's router loss as the int 0"
)


@pytest.mark.parametrize(
    ("cls", "config", "more"),
    [
        pytest.param(GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig, HYBRID, marks=INT_LOSS),
        (Llama4ForCausalLM, Llama4TextConfig, {"num_experts_per_tok": 1, "intermediate_size_mlp": 16, "head_dim": 8}),
    ],
)
def test_a_mixture_whose_names_the_loss_does_not_know_is_trained(cls: Any, config: Any, more: dict[str, Any]) -> None:
    """Before: 'GraniteMoeHybridConfig' object has no attribute 'num_experts', and Llama 4's backbone was not found."""
    model = tiny(cls, config, **{**LOCAL, **more}, router_aux_loss_coef=0.5)
    _, found = train_toy("worst", steps=2, model=model)
    assert len(found["loss/grpo"]) == 2 and all(loss > 0.4 for loss in found.get("loss/router", [1.0]))


# -------------------------------------------------------------------- towers


@pytest.mark.parametrize("part", ["vision_config", "audio_config", "vq_config"])
def test_a_multimodal_checkpoint_is_refused_before_the_start(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(small_folder(), folder)
    config = json.loads((folder / "config.json").read_text())
    known_model(InnerConfig(model=str(folder), loop="supervised", data={"text": "t.txt"}))
    (folder / "config.json").write_text(json.dumps({**config, part: {"hidden_size": 8}}))
    with pytest.raises(InnerError, match=f"is a multimodal checkpoint: its config.json has {part}"):
        known_model(InnerConfig(model=str(folder), loop="supervised", data={"text": "t.txt"}))
    refuse_towers({**config, "text_config": {}, "quantization_config": {}}, "text")


def test_the_hub_is_asked_for_the_config_of_a_model_that_it_calls_multimodal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = SimpleNamespace(gated=False, pipeline_tag="image-text-to-text")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {}, "vision_config": {}}))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *said, **more: info)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda name, file, **more: str(tmp_path / file))
    with pytest.raises(InnerError, match="is a multimodal checkpoint"):
        ask_hub("org/sees", None)
    info.pipeline_tag = "text-generation"
    ask_hub("org/reads", None)
    info.config = {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    with pytest.raises(InnerError, match=r"'org/reads' is quantised: .* quantization_config bitsandbytes"):
        ask_hub("org/reads", None)
    info.config, info.siblings = None, [SimpleNamespace(rfilename="adapter_config.json")]
    with pytest.raises(InnerError, match="'org/reads' has an adapter"):
        ask_hub("org/reads", None)


# -------------------------------------------------------------------- dropout


class Spy(torch.nn.Dropout):
    """Notes whether it is on: (in a forward with gradients, on)."""

    seen: list[tuple[bool, bool]]

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self.seen.append((torch.is_grad_enabled(), self.training and self.p > 0))
        return super().forward(input)


def spied(dropout: float, **config: Any) -> tuple[Any, Spy]:
    """A trainer whose first layer has dropout behind its attention."""
    spy, load = Spy(dropout), AutoModelForCausalLM.from_pretrained
    spy.seen = []

    def with_spy(folder: Any) -> Any:
        model: Any = load(folder)
        layer = model.model.layers[0]
        layer.register_module("spy", spy)
        layer.self_attn.o_proj.register_forward_hook(lambda module, given, out: spy(out))
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AutoModelForCausalLM, "from_pretrained", with_spy)
        return make(config=config), spy


def test_rollouts_and_old_log_probs_have_no_dropout_and_the_loss_has() -> None:
    """Before: sampled by a policy that was damaged at random, another one for each token."""
    trainer, spy = spied(0.5, trl={"disable_dropout": False})
    batch = rollouts(trainer)
    assert spy.seen and not any(on for _, on in spy.seen) and trainer._mode() == "train"
    assert spy.training and trainer.model.model.training, "as it was"
    spy.seen.clear()
    trainer._compute_loss(trainer.model, batch).backward()
    assert spy.seen == [(True, True)]


@pytest.mark.parametrize("objective", ["gspo", "grpo"])
def test_the_first_ratio_is_one_whatever_dropout_the_model_has(objective: str) -> None:
    """GPT-2's is .1: most sequences were outside of gspo's clip range before any step."""
    trainer, spy = spied(0.5, grpo={"objective": objective, "steps_per_generation": 2})
    batch = rollouts(trainer)
    assert "old_per_token_logps" in batch and spy.seen
    trainer._compute_loss(trainer.model, batch)
    assert trainer._metrics["train"]["clip_ratio/region_mean"] == [0.0] and not any(on for _, on in spy.seen)


STALE = {"grpo": {"objective": "gspo"}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora": {"dropout": 0.05}, **STALE}, "inner.lora.dropout = 0.05: a generation serves 4 micro-batches"),
        ({"lora": {"dropout": 0.05}, "grpo": {"num_iterations": 2}}, "serves 2 micro-.* let a generation serve one"),
        ({"lora": {"dropout": 0.05}, "vllm": {}}, r"\[inner.vllm\] corrects .*set inner.vllm.importance_mode = .off"),
        ({"trl": {"disable_dropout": False}, **STALE}, "inner.trl.disable_dropout = false: a generation serves 4"),
        ({"lora": {"dropout": 0.1}, "trl": {"disable_dropout": True}}, "switches inner.lora.dropout = 0.1 off"),
    ],
)
def test_dropout_in_a_loss_with_a_ratio_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError, match=words):
        InnerConfig(**settings)


def test_an_engine_without_a_correction_may_have_dropout_as_the_refusal_says() -> None:
    assert InnerConfig(lora={"dropout": 0.05}, vllm={"importance_mode": "off"}).vllm is not None


def test_dropout_of_an_adapter_stays_in_a_loss_without_a_ratio() -> None:
    from inner.settings.inner import Seeds
    from inner.train.grpo import trainer_arguments

    for lora, disabled in (({"dropout": 0.05}, False), ({}, True), (None, True)):
        config = InnerConfig(lora=lora)
        assert trainer_arguments(config, Seeds(data=0, noise=1), "unused").disable_dropout is disabled
    assert InnerConfig(lora={"dropout": 0.05}, vllm={"importance_mode": "off"}).lora
