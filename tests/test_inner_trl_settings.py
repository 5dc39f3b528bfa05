"""[inner.trl]: what is handed through arrives and acts; what the run owns, or TRL does not know, is refused by name."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from diloco.config import RunConfig
from inner import InnerConfig, InnerError
from inner.trl_fields import TRL_FIELDS
from inner.trl_settings import HANDED_THROUGH, OWNED
from tests.test_inner_trainer import make
from tests.trl_table import PAGE, table_source


def test_the_table_is_that_of_the_installed_trl() -> None:
    assert PAGE.read_text(encoding="utf-8") == table_source(), "python -m tests.trl_table writes it anew"


def test_every_field_is_handed_through_or_owned() -> None:
    assert set(OWNED) | set(HANDED_THROUGH) == set(TRL_FIELDS) and len(HANDED_THROUGH) == 53


def test_it_is_checked_without_torch() -> None:
    code = "import inner, sys; inner.InnerConfig(trl={'top_p': 0.9}); print({'torch', 'trl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.stdout.strip() == "set()", done.stderr


@pytest.mark.parametrize("name", sorted(OWNED))
def test_what_the_run_owns_is_refused_with_what_to_use(name: str) -> None:
    with pytest.raises(InnerError) as refused:
        InnerConfig(trl={name: 1})
    assert str(refused.value) == f"inner.trl.{name} = 1: the run sets this itself. Use {OWNED[name]}."


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"topp": 0.9}, r"unknown setting inner\.trl\.topp; did you mean top_p\?"),
        ({"zzzzzz": 1}, r"unknown setting inner\.trl\.zzzzzz; TRL 1\.16\.0's GRPOConfig has none"),
        ({"top_p": "high"}, r"inner\.trl\.top_p = 'high' must be float, not str"),
        ({"top_k": 3.5}, r"inner\.trl\.top_k = 3\.5 must be int, not float"),
        ({"top_p": True}, r"inner\.trl\.top_p = True must be float, not bool"),
        ({"mask_truncated_completions": 1}, "must be bool, not int"),
        ({"chat_template_kwargs": [1]}, "must be dict or str or None, not list"),
        ({"beta": -0.1}, r"beta = -0\.1 must be 0"),
        ({"sapo_temperature_pos": 2.0}, "does not read sapo_temperature_pos"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InnerError, match=words):
        InnerConfig(trl=values)


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


def test_beta_adds_a_kl_term_and_needs_the_start_model() -> None:
    assert not InnerConfig().compares_with_start and InnerConfig(trl={"beta": 0.1}).compares_with_start
    trainer = trainer_with(beta=0.5)
    assert trainer.beta == 0.5 and trainer.args.beta == 0.5
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert "ref_per_token_logps" in batch and "ref_per_token_logps" not in trainer_batch()


def trainer_batch() -> Any:
    trainer = trainer_with()
    return trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))


def test_chat_template_kwargs_reach_the_template() -> None:
    trainer = trainer_with(chat_template_kwargs={"enable_thinking": False})
    assert trainer.chat_template_kwargs == {"enable_thinking": False}


def test_truncated_completions_are_masked_only_where_it_is_asked() -> None:
    assert trainer_with(mask_truncated_completions=True).mask_truncated_completions
    assert not trainer_with().mask_truncated_completions


def test_reward_weights_scale_the_reward() -> None:
    def mean_reward(**values: Any) -> float:
        trainer = make(config={"trl": values}, reward=lambda completions, **_: [1.0] * len(completions))
        trainer.model.train()
        trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
        return trainer._metrics["train"]["reward"][0]

    assert (mean_reward(), mean_reward(reward_weights=[0.25])) == (1.0, 0.25)
