"""TOPLOC's own proofs: honest workers are believed, others are found, no proof is refused.  `make test-backends`."""

import base64
import copy
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from inner.errors import InnerError
from inner.extras.rollout_check import toploc as toploc_proofs
from inner.extras.rollout_check.toploc import ProofCheck, check_proofs, hidden_states, prove_rollout

PROMPT, COMPLETION = [1, 5, 9, 2], [(7 * i) % 60 + 1 for i in range(40)]
needs_toploc = pytest.mark.skipif(find_spec("toploc") is None, reason="toploc is not built here: make test-backends")


def small_model(seed: int, width: int = 128) -> Any:
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)).eval()


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model(0)


def test_without_the_package_the_error_says_how_to_build_it(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(name: str) -> Any:
        raise ImportError("undefined symbol: const_data_ptr")

    monkeypatch.setattr("inner.optional.import_module", gone)
    with pytest.raises(InnerError, match=r"undefined symbol.*--no-binary toploc --no-build-isolation"):
        prove_rollout(model, PROMPT, COMPLETION)


def test_hidden_states_are_those_of_tokens_that_were_fed_back(model: Any) -> None:
    """The last token is sampled, and no forward has seen it; states with a cache, one by one, are the same."""
    states = hidden_states(model, PROMPT, COMPLETION)
    assert [tuple(s.shape) for s in states] == [(4, 128), *[(128,)] * 39]
    with torch.no_grad():
        out = model(input_ids=torch.tensor([PROMPT]), use_cache=True)
        for token, state in zip(COMPLETION[:5], states[1:6], strict=True):
            out = model(
                input_ids=torch.tensor([[token]]), past_key_values=out.past_key_values, output_hidden_states=True
            )
            assert torch.allclose(out.hidden_states[-1][0, 0], state.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("prompt", "completion"), [([], [1]), ([1], [])])
def test_a_rollout_of_nothing_is_refused(model: Any, prompt: list[int], completion: list[int]) -> None:
    with pytest.raises(ValueError, match="it needs both"):
        hidden_states(model, prompt, completion)


def test_a_model_that_is_too_small_or_has_no_numbers_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="the model has 64 hidden values"):
        prove_rollout(small_model(0, 64), PROMPT, COMPLETION)
    broken = copy.deepcopy(model)
    broken.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match="not a finite number"):
        prove_rollout(broken, PROMPT, COMPLETION)


def test_the_worst_proof_decides() -> None:
    assert ProofCheck(0.05, 3.0, 2).doubts == []
    for found in (ProofCheck(0.2, 3.0, 2), ProofCheck(0.05, 9.0, 2), ProofCheck(1.0, float("inf"), 1)):
        assert "hidden states are not the model's" in found.doubts[0]
    assert ProofCheck(0.2, 3.0, 2, most_mismatches=0.3).doubts == []


@needs_toploc
def test_an_honest_worker_is_believed_in_any_dtype(model: Any) -> None:
    proofs = prove_rollout(model, PROMPT, COMPLETION)
    assert [len(base64.b64decode(p)) for p in proofs] == [258, 258, 258]
    same = check_proofs(model, PROMPT, COMPLETION, proofs)
    assert (same.mismatches, same.mantissa, same.proofs) == (0, 0, 3) and same.doubts == []
    assert (
        check_proofs(
            model, PROMPT, COMPLETION, prove_rollout(copy.deepcopy(model).bfloat16(), PROMPT, COMPLETION)
        ).doubts
        == []
    )


@needs_toploc
def test_other_weights_precision_tokens_and_prompts_are_found(model: Any) -> None:
    rough = copy.deepcopy(model)
    for p in rough.parameters():
        if p.dim() == 2:
            scale = p.abs().amax(dim=1, keepdim=True) / 7
            p.data = (p.data / scale).round() * scale
    other = [*COMPLETION[:20], COMPLETION[20] + 1, *COMPLETION[21:]]
    for proofs in (
        prove_rollout(small_model(1), PROMPT, COMPLETION),
        prove_rollout(rough, PROMPT, COMPLETION),
        prove_rollout(model, PROMPT, other),
        prove_rollout(model, [2, *PROMPT[1:]], COMPLETION),
    ):
        assert check_proofs(model, PROMPT, COMPLETION, proofs).doubts


@needs_toploc
@pytest.mark.parametrize("count", [1, 2, 33, 34, 65])
def test_completions_of_any_length_have_their_proofs(model: Any, count: int) -> None:
    completion = [(5 * i) % 60 + 1 for i in range(count)]
    proofs = prove_rollout(model, PROMPT[:1], completion)
    assert check_proofs(model, PROMPT[:1], completion, proofs).doubts == []
    for wrong in (proofs[:-1], [*proofs, proofs[0]]):
        with pytest.raises(ValueError, match=rf"there must be {len(proofs)}: one of the prompt"):
            check_proofs(model, PROMPT[:1], completion, wrong)


@needs_toploc
def test_what_is_no_proof_is_refused(model: Any) -> None:
    good = prove_rollout(model, PROMPT, COMPLETION)
    null = base64.b64encode(bytes(258)).decode()
    for bad in ("", "AAAA", "é☃", null, good[0][:100], good[0] + good[1]):
        with pytest.raises(ValueError, match=r"is not a proof of TOPLOC|coefficients and modulus"):
            check_proofs(model, PROMPT, COMPLETION, [bad, *good[1:]])


@needs_toploc
def test_a_long_prompt_is_believed_where_the_list_form_of_toploc_is_wrong(model: Any) -> None:
    """More than 65,497 values: indices may collide, and the proof has another modulus, which its list form forgets."""
    import toploc  # pyright: ignore

    rng = torch.Generator().manual_seed(0)
    wrong = 0
    for _ in range(40):
        part = torch.randn(600, 128, generator=rng).bfloat16()
        (proof,) = toploc.build_proofs_base64([part], 32, toploc_proofs.TOPK)
        (listed,) = toploc.verify_proofs_base64([part], [proof], 32, toploc_proofs.TOPK)
        found = toploc_proofs._verify(part, proof)
        assert found.exp_mismatches == 0 == found.mant_err_mean
        wrong += listed.exp_mismatches > 0
    assert wrong > 0, "upstream is mended: the tensor form is not needed any more"
