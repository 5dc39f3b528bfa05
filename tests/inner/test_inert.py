"""Every setting of the channels acts, or is refused where it would not."""

import math
from typing import Any

import pytest
import torch

from inner.losses.divergence import divergence_entries
from inner.settings.channels import READ_ONLY_WHERE, ChannelError, highest_jsd_entry
from inner.settings.flat_names import FLAT_NAMES
from inner.settings.keywords import CHANNEL_KEYWORDS, channels_from_keywords

ON: dict[str, Any] = {"alpha_sdpo": 0.1, "beta_replay": 0.1}
CHANGED: dict[str, Any] = {
    "sdpo_context": "rollout", "sdpo_teacher": "frozen", "sdpo_ema_rate": 0.05, "sdpo_jsd_beta": 0.1,
    "sdpo_temperature": 2.0, "sdpo_token_clip": 0.05, "sdpo_top_k": 20, "sdpo_success": 0.5, "taid_t_start": 0.5,
    "taid_t_end": 0.9, "entropy_opd_h_max": 1.0, "eopd_threshold": 0.5, "dpo_variant": "simpo", "replay_batch_size": 4,
    "replay_skip_unfit": True,
    "replay_dpo_beta": 0.2, "replay_label_smoothing": 0.1, "replay_nll_weight": 0.1, "replay_dpop_lambda": 5.0,
    "simpo_beta": 1.0, "simpo_gamma": 0.5, "sdpo_wrapper": "entropy_opd",
}  # fmt: skip
# what each setting needs besides weights
NEEDS: dict[str, dict[str, Any]] = {
    "sdpo_ema_rate": {"sdpo_teacher": "ema"},
    "sdpo_top_k": {"sdpo_context": "rollout"},
    "sdpo_success": {"sdpo_context": "rollout"},
    "taid_t_start": {"sdpo_wrapper": "taid", "schedule_steps": 5},
    "taid_t_end": {"sdpo_wrapper": "taid", "schedule_steps": 5},
    "entropy_opd_h_max": {"sdpo_wrapper": "entropy_opd"},
    "eopd_threshold": {"sdpo_wrapper": "eopd"},
    "simpo_beta": {"dpo_variant": "simpo"},
    "simpo_gamma": {"dpo_variant": "simpo"},
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_setting_is_taken_where_it_acts_and_refused_where_its_channel_is_off(name: str) -> None:
    channels_from_keywords(**ON, **NEEDS.get(name, {}), **{name: CHANGED[name]})
    with pytest.raises(ChannelError, match=rf"{name} = .* does nothing here.*(alpha_sdpo|beta_replay)"):
        channels_from_keywords(**{name: CHANGED[name]})


@pytest.mark.parametrize("name", NEEDS)
def test_a_setting_is_refused_under_another_choice(name: str) -> None:
    with pytest.raises(ChannelError, match=rf"{name} = .* does nothing here: it is read only where"):
        channels_from_keywords(**ON, **{name: CHANGED[name]})


@pytest.mark.parametrize(
    "settings",
    [
        {"sdpo_wrapper": "entropy_opd", "sdpo_jsd_beta": 0.1},
        {"sdpo_wrapper": "entropy_opd", "sdpo_token_clip": 0.05},
        {"sdpo_wrapper": "taid", "schedule_steps": 5, "sdpo_jsd_beta": 0.1},
        {"dpo_variant": "simpo", "replay_nll_weight": 0.1},
        {"dpo_variant": "simpo", "replay_dpop_lambda": 5.0},
        {"dpo_variant": "simpo", "replay_label_smoothing": 0.1},
        {"dpo_variant": "simpo", "replay_dpo_beta": 0.2},
    ],
)
def test_wrappers_and_variants_refuse_what_they_never_read(settings: dict[str, Any]) -> None:
    with pytest.raises(ChannelError, match="does nothing here"):
        channels_from_keywords(**ON, **settings)


def test_taid_without_a_weight_is_refused() -> None:
    with pytest.raises(ChannelError, match="sdpo_wrapper = 'taid' does nothing here"):
        channels_from_keywords(sdpo_wrapper="taid", schedule_steps=5)


def test_every_setting_but_the_weights_stands_in_the_table() -> None:
    listed = {name for _, _, names in READ_ONLY_WHERE for name in names}
    weights = {"policy_weight", "schedule_steps", "alpha_sdpo", "alpha_sdpo_end", "beta_replay", "beta_replay_end"}
    assert listed == {FLAT_NAMES[name] for name in CHANGED} and set(CHANGED) == set(CHANNEL_KEYWORDS) - weights


@pytest.mark.parametrize("beta", [0.1, 0.5, 0.8])
def test_no_entry_of_the_jsd_exceeds_its_bound(beta: float) -> None:
    p = torch.linspace(0, 1, 201, dtype=torch.float64)
    s, t = (x.log() for x in torch.meshgrid(p, p, indexing="ij"))
    highest = divergence_entries(s, t, beta).max().item()
    assert highest == pytest.approx(highest_jsd_entry(beta), abs=1e-9)
    assert highest_jsd_entry(0.0) == highest_jsd_entry(1.0) == math.inf
