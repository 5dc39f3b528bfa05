"""TRL's GRPOConfig that knows which objective it is.

    POConfig(GRPOConfig)
        objective              a name of the menu (inner.objectives); the fields must hold it
        dynamic_sampling       further generations at most, per batch, to replace groups whose rewards all agree; 0 off
        soft_overlong_tokens   the last tokens before max_completion_length cost up to 1 reward; 0 off   (DAPO, eq. 13)

Checked whenever one is made, by whoever makes it.

Not promised: that TRL's own trainers read the three; ComposerReplicationTrainer does.
"""

from dataclasses import dataclass, field

from trl.trainer.grpo_config import GRPOConfig

from inner.objectives import ObjectiveError, check_settings


@dataclass
class POConfig(GRPOConfig):
    objective: str = field(default="dr_grpo", metadata={"help": "Name in the menu of objectives."})
    dynamic_sampling: int = field(default=0, metadata={"help": "Further generations per batch, at most."})
    soft_overlong_tokens: int = field(default=0, metadata={"help": "Tokens over which the length penalty rises."})

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self.objective, vars(self))
        if self.soft_overlong_tokens > (self.max_completion_length or 0):
            raise ObjectiveError(
                f"soft_overlong_tokens = {self.soft_overlong_tokens} is more than max_completion_length = "
                f"{self.max_completion_length}: every answer would be punished. Set it to a fifth of that, or to 0."
            )
