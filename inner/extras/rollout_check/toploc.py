"""Makes and checks TOPLOC's proofs (arXiv 2501.16007) of a rollout; needs the optional package `toploc`.

    worker    forward ──▶ last hidden states, bf16 ──▶ per 32 tokens the 128 largest, as a polynomial ──▶ 258 bytes
    checker   one forward of the model ──▶ its own 128 largest, and the polynomial's values for them ──▶ how many
              exponents differ, and the difference of the other mantissas

TOPLOC checks, without log-probs, whether hidden states are those of this model at this precision for these tokens,
but not how tokens were drawn, because hidden states do not depend on the temperature; `check_rollouts` checks that.

TOPLOC accepts an empty list of proofs, and divides by zero for the null proof, which it writes after a failure. This
module refuses both.  TOPLOC's verification of a list ignores the proof's modulus: with 115,000 values it doubted
identical values in 4 cases of 40. TOPLOC's verification of a tensor uses the modulus, so this module calls the latter.

The wheel of 0.1.6 is built for an older torch and does not load.  A build from source works (docs/weights.md):

    pip install toploc==0.1.6 --no-binary toploc --no-build-isolation      needs setuptools, g++, three minutes

Not promised: that the thresholds of one model and GPU fit others: measure honest workers first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from inner.optional import optional

TOPK = 128
BATCH = 32  # tokens per proof
# Measured mismatches and mantissa, SmolLM2-135M, checker fp32, worst of 12 proofs: bf16 .03 and 2.8, 8 bits per row
# .05 and 4.2; noise of 2 % of the weights' size .13 and 8.2, 4 bits per row .65 and 31 (docs/weights.md)
MISMATCHES = 0.10  # share of exponents that may differ
MANTISSA = 6.0  # largest mean difference of mantissas, which have 128 steps


@dataclass(frozen=True)
class ProofCheck:
    """The result for one rollout's proofs.  Each number is the largest of all proofs.

    mismatches: share of the largest hidden states with another exponent.   mantissa: mean difference of mantissas whose
    exponents agree; infinite if no exponent agrees.
    """

    mismatches: float
    mantissa: float
    proofs: int
    most_mismatches: float = MISMATCHES
    most_mantissa: float = MANTISSA

    @property
    def doubts(self) -> list[str]:
        """Reasons to doubt the proofs, as texts; [] without a reason."""
        if self.mismatches <= self.most_mismatches and self.mantissa <= self.most_mantissa:
            return []
        return [
            f"its hidden states are not the model's: in the worst of {self.proofs} proofs {self.mismatches:.0%} of the "
            f"exponents differ (at most {self.most_mismatches:.0%} is accepted) and mantissas by {self.mantissa:.1f} "
            f"(at most {self.most_mantissa:g}). Possible causes: another model, precision, prompt or completion"
        ]


def prove_rollout(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[str]:
    """Make a worker's proofs, base64, with one forward: one for the prompt, then one per BATCH tokens.

    An engine that keeps hidden states while it generates may pass them to toploc's `build_proofs_base64` instead, in
    the order of `hidden_states`.   Raises InnerError if toploc is missing, ValueError if there is nothing to prove.
    """
    states = hidden_states(model, prompt, completion)
    _check_sizes(states)
    return _toploc().build_proofs_base64(states, decode_batching_size=BATCH, topk=TOPK)


def check_proofs(
    model: Any,
    prompt: Sequence[int],
    completion: Sequence[int],
    proofs: Sequence[str],
    *,
    mismatches: float = MISMATCHES,
    mantissa: float = MANTISSA,
) -> ProofCheck:
    """Compare a worker's proofs with this model's hidden states on the same tokens.

    mismatches, mantissa: the largest accepted values.
    Raises InnerError if toploc is missing, ValueError for texts that are not proofs, or a wrong number of them.
    """
    states = hidden_states(model, prompt, completion)
    _check_sizes(states)
    parts = [states[0], *(torch.stack(states[at : at + BATCH]) for at in range(1, len(states), BATCH))]
    if len(proofs) != len(parts):
        raise ValueError(
            f"{len(proofs)} proofs of {len(prompt)} prompt and {len(completion)} completion tokens; there must be "
            f"{len(parts)}: one of the prompt, and one of each {BATCH} tokens behind it"
        )
    found = [_verify(part, proof) for part, proof in zip(parts, proofs, strict=True)]
    return ProofCheck(
        mismatches=max(one.exp_mismatches for one in found) / TOPK,
        mantissa=max(math.inf if one.exp_mismatches == TOPK else float(one.mant_err_mean) for one in found),
        proofs=len(parts),
        most_mismatches=mismatches,
        most_mantissa=mantissa,
    )


def _verify(part: Tensor, proof: str) -> Any:
    """Verify one proof of (n, H) with TOPLOC's verification of a tensor."""
    (found,) = _toploc().verify_proofs(
        part, [_parse(proof)], decode_batching_size=len(part), topk=TOPK, skip_prefill=True
    )
    return found


@torch.no_grad()
def hidden_states(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> list[Tensor]:
    """Return the head's inputs, bf16: (P, H) of the prompt, then (H,) per completion token except the last."""
    if not prompt or not completion:
        raise ValueError(f"a rollout has {len(prompt)} prompt and {len(completion)} completion tokens; it needs both")
    ids = torch.tensor([[*prompt, *completion[:-1]]], device=model.device)
    last = model(input_ids=ids, output_hidden_states=True).hidden_states[-1][0].to(torch.bfloat16).cpu()
    return [last[: len(prompt)], *last[len(prompt) :]]


def _check_sizes(states: Sequence[Tensor]) -> None:
    width = states[0].shape[-1]
    if width < TOPK:
        raise ValueError(
            f"the model has {width} hidden values for a token, and a proof needs {TOPK}. Check it with check_rollouts"
        )
    if not all(torch.isfinite(state).all() for state in states):
        raise ValueError("a hidden state is not a finite number: nothing can be proved of it")


def _parse(proof: str) -> Any:
    """Parse a proof.   Raise ValueError for any invalid text; TOPLOC's own parser raises several kinds of errors."""
    poly = _toploc().C.csrc.poly.ProofPoly
    try:
        found = poly.from_base64(proof)
    except Exception as error:
        raise ValueError(f"{proof[:40]!r} is not a proof of TOPLOC: {error}") from error
    if len(found) != TOPK or not found.modulus:
        raise ValueError(f"{proof[:40]!r}… has {len(found)} coefficients and modulus {found.modulus}; needed: {TOPK}")
    return found


def _toploc() -> Any:
    return optional(
        "toploc",
        "TOPLOC's proofs need the package toploc, which cannot be imported here ({}). Its wheel does not "
        "load with this torch: `pip install toploc==0.1.6 --no-binary toploc --no-build-isolation` builds it "
        "(setuptools and g++, three minutes). `check_rollouts` needs no package.",
    )
