"""Rollouts that another process sampled: its rows are the slot's, and TRL's correction counts."""

import json
import math
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from diloco.run.combinations import prepared_for_actors, refuse_actors
from diloco.run.config import ConfigError, RunConfig
from inner.data.order import Share
from inner.errors import InnerError
from inner.rollouts.recording import drift
from inner.rollouts.recording.acting import Sampler
from inner.rollouts.recording.recorded import BundlePlace, record_rollouts
from inner.rollouts.recording.unpack import restore, unpack
from inner.settings.inner import InnerConfig, Seeds
from inner.train.build import build_inner
from tests.inner.test_recorded import Kept
from tests.inner.test_toolworld import SMALL, small_folder
from tests.support.tables import merge_tables

torch.set_num_threads(1)
SHARE = Share(11, 1, 3)


def a_loop(**settings: Any) -> Any:
    config = InnerConfig(**merge_tables(SMALL, settings))
    return build_inner(config, small_folder(), {}, Seeds(data=0, noise=0, share=SHARE))


def trained(kept: Kept, steps: int = 1, **settings: Any) -> tuple[dict[str, float], torch.Tensor]:
    loop = a_loop(**settings)
    record_rollouts(loop.trainer, kept)
    left = iter([False] * (steps - 1) + [True])
    loop.train(lambda: next(left))
    return loop.pop_metrics(), torch.cat([p.detach().flatten() for p in loop.model.parameters()])


def sampled(generations: int = 1, **settings: Any) -> Kept:
    kept = Kept()
    for g, body in enumerate(bodies_of(generations, json.dumps(settings))):
        kept.bodies[BundlePlace(g, g, 0)] = body
    return kept


@cache
def bodies_of(generations: int, settings: str) -> list[bytes]:
    actor = Sampler(a_loop(**json.loads(settings)).trainer)
    return [actor.sample(SHARE, g).pack() for g in range(generations)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("settings", [{}, {"sdpo": {"weight": 0.1}}], ids=["plain", "sdpo"])
def test_a_trainer_takes_an_actors_rollouts_for_its_own_rows(settings: dict[str, Any]) -> None:
    kept = sampled(generations=3, **settings)
    numbers, _ = trained(kept, steps=3, **settings)
    assert not kept.refused and kept.found == list(kept.bodies) and math.isfinite(numbers["loss"])
    assert 0 < numbers["importance_ratio_min"] < 1 <= numbers["importance_ratio_max"] <= 2, "two steps old, at last"


@pytest.mark.slow
def test_rollouts_of_the_same_weights_count_as_they_are() -> None:
    """The first generation: the trainer stands where the actor does."""
    kept = sampled()
    numbers, corrected = trained(kept)
    assert numbers["importance_ratio_min"] == pytest.approx(1, abs=1e-5)
    assert numbers["importance_ratio_max"] == pytest.approx(1, abs=1e-5)
    (place, body), plain = *kept.bodies.items(), Kept()
    plain.bodies[place] = replace(unpack(body), logprobs=None).pack()
    without, uncorrected = trained(plain)
    assert "importance_ratio" not in without
    assert numbers["grad_norm"] == pytest.approx(without["grad_norm"], rel=1e-4)
    assert torch.allclose(corrected, uncorrected, atol=1e-6)


def test_the_replica_goes_on_with_other_random_numbers_than_the_actor() -> None:
    """They come from the bundle, so that a replacement has the same."""
    actor = Sampler(a_loop().trainer)
    drawn = []
    for generation in range(3):
        bundle = actor.sample(SHARE, generation)
        ours = torch.rand(4).tolist()
        restore(bundle.random)
        drawn += [ours, torch.rand(4).tolist()]
        restore(bundle.random)
        assert torch.rand(4).tolist() == drawn[-1]
    assert len({tuple(numbers) for numbers in drawn}) == 6


def test_the_loss_is_weighed_by_the_ratio_and_at_most_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """So this fails if TRL moves the place at which it asks for vLLM."""
    monkeypatch.setattr(drift, "FARTHEST", math.inf)
    kept = sampled()
    base, _ = trained(kept)
    for likelier, counts in ((1.1, 1.1), (1.5, 1.5), (4.0, 2.0)):
        found, _ = trained(shifted(kept, likelier))
        assert found["grad_norm"] == pytest.approx(counts * base["grad_norm"], rel=1e-3), likelier


def shifted(kept: Kept, likelier: float) -> Kept:
    """Return the bundle as if its weights had given each token a `likelier` times smaller probability."""
    ((place, body),) = kept.bodies.items()
    bundle, other = unpack(body), Kept()
    assert bundle.logprobs is not None
    other.bodies[place] = replace(
        bundle, logprobs=[[x - math.log(likelier) for x in row] for row in bundle.logprobs]
    ).pack()
    return other


@pytest.mark.parametrize(("likelier", "is_used"), [(1.2, True), (1.25, False)])
def test_rollouts_of_a_distant_policy_are_passed_over(likelier: float, is_used: bool) -> None:
    """Beyond .2 nats per token."""
    kept = shifted(sampled(), likelier)
    numbers, _ = trained(kept)
    assert bool(kept.found) == is_used and bool(kept.refused) != is_used
    assert "nats per token" in "".join(kept.refused) or is_used
    assert ("importance_ratio" in numbers) == is_used


@pytest.mark.parametrize("settings", [{}, {"sdpo": {"weight": 0.1}}], ids=["plain", "sdpo"])
def test_the_drift_counts_the_models_own_tokens(settings: dict[str, Any]) -> None:
    """Against a sum by hand over unpadded rows; tools' tokens are left out."""
    loop = a_loop(**settings)
    record_rollouts(loop.trainer, Kept())
    ((_, body),) = sampled(**settings).bodies.items()
    bundle = unpack(body)
    assert drift.drift_of(loop.trainer, bundle) == pytest.approx(0, abs=1e-5)
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.mul_(1.05)
    off, count = 0.0, 0
    masks = bundle.mask or [[1] * len(ids) for ids in bundle.ids]
    for prompt, ids, mask, logprobs in zip(bundle.prompt_ids, bundle.ids, masks, bundle.logprobs or [], strict=True):
        with torch.no_grad():
            logits = loop.model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        now = (logits / loop.trainer.temperature).log_softmax(-1)
        off += sum(abs(float(now[i, t]) - x) for i, (t, m, x) in enumerate(zip(ids, mask, logprobs, strict=True)) if m)
        count += sum(mask)
    assert drift.drift_of(loop.trainer, bundle) == pytest.approx(off / count, rel=1e-3) and off > 0


def test_an_actor_says_the_log_probs_of_rollouts_that_the_loss_leaves_out() -> None:
    """TRL's mask over truncated rollouts hides them from the attention, too."""
    short = {"sampling": {"max_completion_length": 17}}  # ToolWorld's second turn is cut off
    masked, whole = (sampled(**short, trl={"mask_truncated_completions": mask}) for mask in (True, False))
    ((_, ours),), ((_, theirs),) = masked.bodies.items(), whole.bodies.items()
    found, expected = unpack(ours), unpack(theirs)
    assert found.ids == expected.ids and any(len(ids) == 17 for ids in found.ids)
    for one, other in zip(found.logprobs or [], expected.logprobs or [], strict=True):
        assert one == pytest.approx(other, abs=1e-5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "bad", [math.nan, 0.5, *(pytest.param(x, marks=pytest.mark.slow) for x in (math.inf, -math.inf))]
)
def test_log_probs_that_are_none_are_refused(bad: float) -> None:
    kept = sampled()
    ((place, body),) = kept.bodies.items()
    bundle = unpack(body)
    assert bundle.logprobs is not None
    kept.bodies[place] = replace(bundle, logprobs=[[bad] * len(ids) for ids in bundle.ids]).pack()
    trained(kept)
    assert "log-probs" in kept.refused[0] and not kept.found


def test_a_few_tokens_may_have_no_log_prob_where_vllm_samples_and_not_all() -> None:
    """A bundle of NaN had no drift, and was trained on without a correction."""
    loop = a_loop()
    record_rollouts(loop.trainer, Kept())
    loop.trainer.use_vllm = True
    ((_, body),) = sampled().bodies.items()
    bundle = unpack(body)
    rows = [list(row) for row in bundle.logprobs or []]
    rows[0][0] = math.nan
    assert drift.why_uncorrected(loop.trainer, replace(bundle, logprobs=rows)) == ""
    assert drift.drift_of(loop.trainer, replace(bundle, logprobs=rows)) == pytest.approx(0, abs=1e-5)
    for row in rows:
        row[0] = math.nan
    nothing = replace(bundle, logprobs=[[math.nan] * len(ids) for ids in bundle.ids])
    total = sum(map(len, bundle.ids))
    assert f"no log-probs for {total} of {total} tokens" in drift.why_uncorrected(loop.trainer, nothing)
    if len(rows) > drift.MISSING * total:
        assert "no log-probs for 16 of" in drift.why_uncorrected(loop.trainer, replace(bundle, logprobs=rows))


def test_objectives_that_need_their_own_weights_have_no_actors() -> None:
    with pytest.raises(InnerError, match="Start no actors"):
        Sampler(a_loop(grpo={"objective": "dapo"}).trainer)


@pytest.mark.slow
def test_actors_do_not_sample_for_a_loss_with_dropout() -> None:
    """π_old has none: the ratio of the two would be noise."""
    for inner in ({"lora": {"dropout": 0.05}}, {"trl": {"disable_dropout": False}}):
        with pytest.raises(ConfigError, match=r"actors cannot sample: inner.lora.dropout = 0.0"):
            refuse_actors(prepared_for_actors(RunConfig.from_dict({"inner": inner})))
    refuse_actors(prepared_for_actors(RunConfig.from_dict({"inner": {"lora": {}}})))
    loop = a_loop()
    loop.model.dropout = torch.nn.Dropout(0.1)
    with pytest.raises(InnerError, match="actors cannot sample for this run: its loss has dropout"):
        Sampler(loop.trainer)
    kept = sampled()
    loop = a_loop()
    loop.model.dropout = torch.nn.Dropout(0.1)
    record_rollouts(loop.trainer, kept)
    loop.train(lambda: True)
    assert "keeps dropout in the loss" in kept.refused[0] and not kept.found
