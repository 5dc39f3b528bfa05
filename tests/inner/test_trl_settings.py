"""[inner.trl]: what is handed through arrives and acts; what the run owns, or TRL does not know, is refused by name."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from diloco.run.config import ConfigError, RunConfig
from inner import InnerConfig, InnerError
from inner.settings.tables import list_settings
from inner.settings.trl import ALIASES, GENERATION_OWNED, HANDED_THROUGH, OWNED, instead_in_words
from inner.settings.trl_fields import TRL_FIELDS
from tests.inner.test_trainer import make, measure, rollouts
from tests.support.trl_table import PAGE, table_source


def test_what_is_handed_through_is_there_under_both_sets_of_versions() -> None:
    found: dict[str, Any] = {}
    exec(table_source(), found)
    assert {name: found["TRL_FIELDS"].get(name) for name in HANDED_THROUGH} == {
        n: TRL_FIELDS[n] for n in HANDED_THROUGH
    }


PINS = (Path(__file__).parents[2] / "constraints.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.skipif(f"transformers=={transformers.__version__}" not in PINS, reason="other versions have other fields")
def test_the_table_is_that_of_the_installed_trl() -> None:
    assert PAGE.read_text(encoding="utf-8") == table_source(), "python -m tests.support.trl_table writes it anew"


def test_every_field_is_handed_through_or_owned() -> None:
    assert set(OWNED) | set(HANDED_THROUGH) == set(TRL_FIELDS) and len(HANDED_THROUGH) == 46


def test_it_is_checked_without_torch() -> None:
    code = "import inner, sys; inner.InnerConfig(trl={'top_p': 0.9}); print({'torch', 'trl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_the_run_owns_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(InnerError) as refused:
        InnerConfig(trl={name: 1})
    assert str(refused.value) == f"inner.trl.{name} = 1: the run sets this itself{instead_in_words(OWNED[name])}."
    assert "Use nothing" not in str(refused.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"topp": 0.9}, r"unknown setting inner\.trl\.topp; did you mean top_p\?"),
        ({"learning_rat": 0.1}, r"learning_rat; you may mean learning_rate\. Use inner\.lr\. TRL 1"),
        ({"do_predct": True}, r"you may mean do_predict\. Leave it out: the run trains, .*\. TRL 1"),
        ({"adam_epsilon": 1e-6}, r"Leave it out: it is 1e-8, torch's default\."),
        ({"label_smoothing_factor": 0.1}, r"Leave it out: a reward has no labels .* inner\.replay\.label_smoothing\."),
        ({"average_tokens_across_devices": False}, r"Leave it out: the policy loss counts the tokens of all devices"),
        ({"eval_steps": 5}, r"Use \[eval\]"),
        ({"report_to": "wandb"}, r"Use \[log\]"),
        ({"zzzzzz": 1}, r"unknown setting inner\.trl\.zzzzzz; correct the name, or leave it out\. TRL 1"),
        ({"top_p": "high"}, r"inner\.trl\.top_p = 'high' must be float, not str"),
        ({"top_k": 3.5}, r"inner\.trl\.top_k = 3\.5 must be int, not float"),
        ({"top_p": True}, r"inner\.trl\.top_p = True must be float, not bool"),
        ({"mask_truncated_completions": 1}, "must be bool, not int"),
        ({"chat_template_kwargs": [1]}, "must be dict or str or None, not list"),
        ({"beta": -0.1}, r"beta = -0\.1 must be 0"),
        ({"beta": float("inf")}, r"inner\.trl\.beta = inf must be a finite number\. Set it so"),
        ({"delta": float("nan")}, "delta = nan must be a finite number"),
        ({"use_bias_correction_kl": True}, "is read only with inner.trl.beta. Set inner.trl.beta"),
        ({"entropy_target": 2.0}, "read only with inner.trl.use_adaptive_entropy"),
        ({"entropy_coef_max": 0.1, "use_adaptive_entropy": False}, "read only with inner.trl.use_adaptive_entropy"),
        ({"entropy_coef_min": 0.0, "entropy_coef": 0.01}, "entropy_coef_min = 0.0 does nothing here"),
        ({"entropy_coef_delta": 0.01}, "entropy_coef_delta = 0.01 does nothing here"),
        ({"reward_weights": [0.0]}, r"reward_weights = \[0.0\] teaches nothing: weights must be finite numbers"),
        ({"reward_weights": [float("nan")]}, "teaches nothing: weights must be finite numbers"),
        ({"reward_weights": ["one"]}, "teaches nothing: weights must be finite numbers"),
        ({"top_entropy_quantile": -1}, "top_entropy_quantile = -1 must be at least 0 and at most 1"),
        ({"top_entropy_quantile": 20.0}, "must be at least 0 and at most 1"),
        ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos = 0.0 must be greater than 0"),
        ({"sapo_temperature_neg": -1}, "sapo_temperature_neg = -1 must be greater than 0"),
        ({"top_p": 1.5}, "top_p = 1.5 must be greater than 0 and at most 1"),
        ({"min_p": -0.1}, "min_p = -0.1 must be at least 0 and at most 1"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0 must be greater than 0"),
        ({"use_transformers_paged": True}, 'cast the trained float32 weights to it for good.*inner.autocast = "off"'),
        ({"use_transformers_continuous_batching": True}, 'with inner.autocast = "auto"'),
        ({"sapo_temperature_pos": 2.0}, "does not read sapo_temperature_pos"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, '"dr_grpo" has scale_rewards = "none" here.*"grpo"'),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError, match=words):
        InnerConfig(trl=values)


@pytest.mark.parametrize(
    ("given", "use"),
    [
        ({"temperature": 0.6}, "temperature = 0.6.* Use inner.sampling.temperature"),
        ('{"temperature": 0.6}', "temperature = 0.6.* Use inner.sampling.temperature"),
        ({"max_new_tokens": 2000}, "Use inner.sampling.max_completion_length"),
        ({"max_tokens": 2000}, "Use inner.sampling.max_completion_length"),
        ({"n": 4}, "Use inner.sampling.num_generations"),
        (
            {"no_repeat_ngram_size": 3, "do_sample": False},
            "do_sample = False.* Leave it out: rollouts are",
        ),
        ({"num_beams": 4}, "Leave it out: rollouts are always sampled"),
        ({"eos_token_id": 5}, "Leave it out: special tokens"),
        ({"top_k": 5}, "Use inner.trl.top_k"),
        ({"max_time": 5.0}, "max_time = 5.0, which cuts completions after so many seconds.* Leave it out"),
        ("temperature = 0.6", "is no JSON object"),
        ("[1]", "is no JSON object"),
    ],
)
def test_generation_kwargs_cannot_replace_what_the_run_owns(given: Any, use: str) -> None:
    """Before: sampled at .6, while the loss took log-probs at inner.sampling.temperature."""
    with pytest.raises(InnerError, match=f"(?s)inner.trl.generation_kwargs .*{use}"):
        InnerConfig(trl={"generation_kwargs": given})


@pytest.mark.parametrize("name", ["do_sample", "num_beams", "temperature", "top_k"])
def test_generation_kwargs_may_say_what_the_run_says(name: str) -> None:
    """Before: do_sample = true was refused, because a rollout is sampled."""
    same = {"do_sample": True, "num_beams": 1, "temperature": 0.6, "top_k": 5}[name]
    run: dict[str, Any] = {"sampling": {"temperature": 0.6}, "trl": {"top_k": 5, "generation_kwargs": {name: same}}}
    assert InnerConfig(**run).trl["generation_kwargs"] == {name: same}
    if name == "do_sample":  # vLLM's sampling has no setting of that name
        with pytest.raises(InnerError, match=r"do_sample = True.* Leave it out"):
            InnerConfig(**run, vllm={})


@pytest.mark.parametrize("given", [{}, {"no_repeat_ngram_size": 3}, '{"no_repeat_ngram_size": 3}'])
def test_other_generation_kwargs_are_handed_through(given: Any) -> None:
    assert InnerConfig(trl={"generation_kwargs": given}).trl == {"generation_kwargs": given}


@pytest.mark.parametrize("name", ["beta", "entropy_coef", "delta"])
def test_a_part_of_the_policy_loss_is_refused_where_that_is_left_out(name: str) -> None:
    alone = {"replay": {"weight": 0.1, "pairs": "pairs.jsonl"}}
    assert InnerConfig(trl={name: 1.5}, **alone).trl
    with pytest.raises(InnerError, match=f"inner.trl.{name} = 1.5 does nothing here.*inner.grpo.weight above 0"):
        InnerConfig(trl={name: 1.5}, grpo={"weight": 0}, **alone)


def test_no_entropy_is_too_low_for_a_quantile_of_0() -> None:
    """It is the strictest quantile and not "off": TRL then trains the token of the highest entropy."""
    assert InnerConfig(trl={"top_entropy_quantile": 0.0}).trl == {"top_entropy_quantile": 0.0}
    with pytest.raises(InnerError, match=r"top_entropy_quantile = 0\.0 does nothing here"):
        InnerConfig(
            trl={"top_entropy_quantile": 0.0}, grpo={"weight": 0}, replay={"weight": 0.1, "pairs": "pairs.jsonl"}
        )


@pytest.mark.parametrize("scored", [{"environment": "env.py:E"}, {"boxes": "local"}])
@pytest.mark.parametrize("own", [{"function": "r.py:f"}, {"functions": {"r.py:f": 0.0}}])
def test_a_reward_that_is_only_logged_stands_beside_one_that_has_no_line(scored: Any, own: Any) -> None:
    """Before: refused as a run without a reward, though TRL gives an environment's get_reward the weight 1."""
    trl = {} if "functions" in own else {"reward_weights": [0.0]}
    rows = {"task": "harbor:tasks"} if "boxes" in scored else {"prompts": "p.jsonl"}
    assert InnerConfig(model="a/b", data=rows, sampling=scored, rewards=own, trl=trl).rewards.lines


def test_rewards_are_normalised_before_their_sum_where_the_objective_scales_by_group() -> None:
    assert InnerConfig(trl={"multi_objective_aggregation": "normalize_then_sum"}, grpo={"objective": "grpo"}).trl
    assert InnerConfig(trl={"multi_objective_aggregation": "sum_then_normalize"}).trl


def test_settings_with_their_partners_are_handed_through() -> None:
    for trl in (
        {"use_bias_correction_kl": True, "beta": 0.1},
        {"use_bias_correction_kl": False},
        {"use_adaptive_entropy": True, "entropy_target": 2.0, "entropy_coef_max": 0.1},
        {"reward_weights": [-1.0]},
    ):
        assert InnerConfig(trl=trl).trl == trl


@pytest.mark.parametrize(
    ("grpo", "tokens"),
    [({"objective": "dapo"}, "a fifth of"), ({"objective": "grpo", "soft_overlong_tokens": 8}, "8 by")],
)
def test_a_length_penalty_is_not_normalised_to_the_size_of_a_reward(grpo: dict[str, Any], tokens: str) -> None:
    """A right answer with a penalty of .0098 had the advantage -1.43."""
    each = {"multi_objective_aggregation": "normalize_then_sum"}
    about = {"sampling": {"max_completion_length": 512}, "trl": each}
    with pytest.raises(InnerError, match=f"soft_overlong_tokens = {tokens} .*its own deviation"):
        InnerConfig(grpo=grpo, **about)
    assert InnerConfig(grpo={**grpo, "soft_overlong_tokens": 0}, **about).trl == each
    assert InnerConfig(grpo=grpo, sampling=about["sampling"]).trl == {}


def test_continuous_batching_is_handed_through_where_nothing_is_cast() -> None:
    name = "use_transformers_continuous_batching"
    for fits in ({"autocast": "off"}, {"dtype": "bfloat16"}):
        assert InnerConfig(trl={name: True}, **fits).trl == {name: True}
    assert InnerConfig(trl={name: False}).autocast == "auto"


def test_a_supervised_run_has_no_trl() -> None:
    with pytest.raises(
        InnerError, match=r'inner\.trl = .* does nothing here: it is read only where inner\.loop = "grpo"'
    ):
        InnerConfig(loop="supervised", model="tiny", data={"text": "a.txt"}, trl={"top_p": 0.9})


@pytest.mark.parametrize("key", ["top_p", "reward_weights"])
def test_a_key_of_trl_in_another_table_is_found(key: str) -> None:
    with pytest.raises(InnerError, match=rf"unknown setting inner\.sampling\.{key}; did you mean inner\.trl\.{key}\?"):
        InnerConfig.from_dict({"sampling": {key: 0.9}})


def test_it_is_mathematics() -> None:
    config = RunConfig.from_dict({"inner": {"trl": {"top_p": 0.9}}})
    assert config.mathematics()["inner"]["trl"] == {"top_p": 0.9}
    assert RunConfig.from_dict(config.to_dict()) == config


def trainer_with(**values: Any) -> Any:
    return make(config={"trl": values})


def test_sampling_settings_reach_the_generation() -> None:
    trainer = trainer_with(top_p=0.5, top_k=3, min_p=0.1, repetition_penalty=1.5)
    held = trainer.generation_config
    assert (held.top_p, held.top_k, held.min_p, held.repetition_penalty) == (0.5, 3, 0.1, 1.5)


def test_top_k_of_one_samples_greedily() -> None:
    """Without it, siblings differ: their prompt is the same."""

    def answers(**values: Any) -> int:
        trainer = trainer_with(**values)
        trainer.model.train()
        batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        rows = [tuple(row[mask.bool()].tolist()) for row, mask in zip(
            batch["completion_ids"], batch["completion_mask"], strict=True)]  # fmt: skip
        prompts = [tuple(row.tolist()) for row in batch["prompt_ids"]]
        return len(set(zip(prompts, rows, strict=True))) - len(set(prompts))

    assert answers(top_k=1) == 0 < answers()


def test_a_small_top_p_samples_only_what_is_likely() -> None:
    """Each token of a rollout is the likeliest where the nucleus holds one token alone."""

    def share_of_likeliest(**values: Any) -> float:
        trainer = trainer_with(**values)
        batch = rollouts(trainer)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        with torch.no_grad():
            best = trainer.model(input_ids=ids, attention_mask=mask).logits.argmax(-1)[:, :-1]
        sampled = batch["tool_mask"].bool() & batch["completion_mask"].bool()
        hits = best[:, -batch["completion_ids"].shape[1] :] == batch["completion_ids"]
        return hits[sampled].float().mean().item()

    assert share_of_likeliest(top_p=1e-6) == 1.0 > share_of_likeliest()


def test_beta_adds_a_kl_term_and_needs_the_start_model() -> None:
    assert not InnerConfig().compares_with_start and InnerConfig(trl={"beta": 0.1}).compares_with_start
    trainer = trainer_with(beta=0.5)
    assert trainer.beta == 0.5 and trainer.args.beta == 0.5
    batch = rollouts(trainer)
    assert "ref_per_token_logps" in batch and "ref_per_token_logps" not in rollouts(trainer_with())


def test_beta_pulls_back_to_the_start_model() -> None:
    """Away from θ₀ the loss without advantages is β · KL, and its gradient is not zero; without β there is none."""

    def pull(beta: float) -> tuple[float, float]:
        trainer = trainer_with(beta=beta)
        batch = rollouts(trainer)
        batch["advantages"].zero_()
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.mul_(1.01)
        loss, gradient = measure(trainer.model, lambda: trainer._compute_loss(trainer.model, batch))
        return loss.item(), gradient.norm().item()

    off, half, whole = pull(0.0), pull(0.05), pull(0.1)
    assert off == (0.0, 0.0) and half[0] > 0 and half[1] > 0
    assert whole[0] == pytest.approx(2 * half[0], rel=1e-4) and whole[1] == pytest.approx(2 * half[1], rel=1e-3)


def test_chat_template_kwargs_change_the_prompt() -> None:
    """The small world's template does not read any: this one writes what it is given behind each prompt."""

    def prompt(**values: Any) -> str:
        trainer = trainer_with(**values)
        tokenizer = trainer.processing_class
        tokenizer.chat_template += "{% if say_twice %}{{ messages[0]['content'] }}{% endif %}"
        return tokenizer.decode(rollouts(trainer)["prompt_ids"][0], skip_special_tokens=True)

    once, twice = prompt(), prompt(chat_template_kwargs={"say_twice": True})
    assert twice.startswith(once) and len(twice) > len(once)


def test_a_batch_of_truncated_completions_has_no_loss_where_they_are_masked() -> None:
    def loss_and_gradient(**values: Any) -> tuple[float, float]:
        trainer = make(config={"trl": values, "sampling": {"max_completion_length": 2}})
        batch = rollouts(trainer)
        batch["advantages"] += 0.3
        loss, gradient = measure(trainer.model, lambda: trainer._compute_loss(trainer.model, batch))
        return loss.item(), gradient.norm().item()

    assert loss_and_gradient(mask_truncated_completions=True) == (0.0, 0.0)
    assert all(abs(value) > 1e-3 for value in loss_and_gradient())


def test_reward_weights_scale_the_reward() -> None:
    def mean_reward(**values: Any) -> float:
        trainer = make(config={"trl": values}, reward=lambda completions, **_: [1.0] * len(completions))
        trainer.model.train()
        trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        return trainer._metrics["train"]["reward"][0]

    assert (mean_reward(), mean_reward(reward_weights=[0.25])) == (1.0, 0.25)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"learning_rate": 1e-6}, "unknown setting inner.learning_rate. Use inner.lr"),
        ({"per_device_train_batch_size": 8}, "Use inner.batch_size"),
        ({"max_steps": 100}, "Use outer.sync_every and fleet.steps"),
        ({"save_steps": 100}, "Use outer.snapshot_every"),
        ({"warmup_ratio": 0.1}, "Use inner.schedule.lr_warmup"),
        ({"lora": {"rank": 8}}, "Use inner.lora.r"),
        ({"lora": {"target_modules": []}}, "Use inner.lora.targets"),
        ({"sampling": {"max_new_tokens": 8}}, "Use inner.sampling.max_completion_length"),
        ({"temperature": 1.0}, "write temperature in the table [inner.sampling]"),
        ({"sampling": {"top_k": 5}}, "did you mean inner.trl.top_k?"),
        ({"beta": 0.1}, "did you mean inner.trl.beta?"),
        ({"fsdp": "full_shard"}, "Leave it out: a place says how many devices a replica has"),
        ({"load_in_4bit": True}, "Leave it out: weights are trained as they are"),
        ({"trl": {"warmup_ratio": 0.1}}, "Use inner.schedule.lr_warmup"),
        ({"trl": {"learning_rate": 1.0}}, "the run sets this itself. Use inner.lr"),
        ({"weird_rate": 1.0}, "unknown setting inner.weird_rate; known: "),  # no guess out of another table
    ],
)
def test_a_name_of_another_trainer_is_told_what_it_is_here(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(InnerError) as refused:
        InnerConfig.from_dict(raw)
    assert told in str(refused.value)


def test_every_name_of_trl_is_known_wherever_it_is_written() -> None:
    """Before: a guess by likeness out of any table, e.g. inner.sdpo.ema_rate for learning_rate."""
    keys = {name.rpartition(".")[2] for name in list_settings(RunConfig)}
    for name in TRL_FIELDS:
        with pytest.raises(ConfigError) as refused:
            RunConfig.from_dict({"fleet": {name: 1}})
        said = str(refused.value)
        here = [f"inner.trl.{name}?", *([f"{name}?"] if name in keys else [])]
        assert "Use " in said or "Leave it out" in said or any(words in said for words in here), said


@pytest.mark.parametrize("name", sorted(OWNED))
def test_a_typing_error_is_not_answered_with_a_key_that_is_refused(name: str) -> None:
    with pytest.raises(InnerError) as refused:
        InnerConfig(trl={name[:-1]: 1})
    guess = re.search(r"did you mean (\w+)\?", str(refused.value))
    assert guess is None or guess[1] in HANDED_THROUGH, refused.value


def test_every_place_that_a_name_is_told_exists() -> None:
    known = {*list_settings(RunConfig), "inner.lora", "inner.schedule", "inner.vllm", "inner.data"}
    known |= {f"inner.trl.{name}" for name in HANDED_THROUGH}
    for place in [*ALIASES.values(), *GENERATION_OWNED.values()]:
        named = re.findall(r"\b(?:inner|outer|fleet|eval)(?:\.\w+)+", place)
        assert set(named) <= known, place
