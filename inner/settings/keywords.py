"""Converts the channels' settings from and to keywords of ComposerReplicationTrainer and compose_loss.

    alpha_sdpo = 0.1, sdpo_wrapper = "taid"     ◀──▶     ChannelSettings: sdpo.weight, sdpo.wrapper

Not promised: keywords that flat_names.py lacks.  No torch here.
"""

from collections.abc import Mapping
from typing import Any

from inner.errors import InnerError
from inner.settings.channels import ChannelError, ChannelSettings, ReplaySettings, SdpoSettings
from inner.settings.flat_names import FLAT_NAMES
from inner.settings.objectives import GrpoSettings
from inner.settings.task import ScheduleSettings

# a trainer's keyword -> (table, key). Replay's `pairs` is not here: a trainer also takes it as objects
CHANNEL_KEYWORDS: dict[str, tuple[str, str]] = {
    flat: (table, key)
    for flat, dotted in FLAT_NAMES.items()
    for table, _, key in [dotted.partition(".")]
    if (table in ("sdpo", "replay") and dotted != "replay.pairs") or dotted in ("grpo.weight", "schedule.weight_steps")
}


def channels_from_keywords(**keywords: Any) -> ChannelSettings:
    """Make the settings from a trainer's keywords. Error texts name the keywords.   Raises ChannelError."""
    tables: dict[str, dict[str, Any]] = {"sdpo": {}, "replay": {}, "grpo": {}, "schedule": {}}
    for name, value in keywords.items():
        table, key = CHANNEL_KEYWORDS[name]
        tables[table][key] = value
    try:
        return ChannelSettings(
            policy_weight=GrpoSettings(**tables["grpo"]).weight,
            sdpo=SdpoSettings(**tables["sdpo"]),
            replay=ReplaySettings(**tables["replay"]),
            weight_steps=ScheduleSettings(**tables["schedule"]).weight_steps,
        )
    except InnerError as error:
        raise ChannelError(_with_keywords(str(error))) from None


def keywords_of(channels: ChannelSettings) -> dict[str, Any]:
    """Return the settings as a trainer's keywords."""
    owners = {"sdpo": channels.sdpo, "replay": channels.replay}
    values = {"policy_weight": channels.policy_weight, "schedule_steps": channels.weight_steps}
    for name, (table, key) in CHANNEL_KEYWORDS.items():
        if table in owners:
            values[name] = getattr(owners[table], key)
    return values


def pop_channel_settings(options: dict[str, Any]) -> Mapping[str, Any]:
    """Remove the channel settings from keyword arguments, and return them."""
    return {name: options.pop(name) for name in CHANNEL_KEYWORDS if name in options}


def _with_keywords(text: str) -> str:
    """Return a table's error text with the trainer's keywords in place of the table's keys."""
    for flat, (table, key) in sorted(CHANNEL_KEYWORDS.items(), key=lambda item: -len(item[1][1])):
        text = text.replace(f"inner.{table}.{key}", flat)
    return text
