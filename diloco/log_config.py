"""[log] of a run.toml: the trackers that a run's supervisor writes its curves to.  No torch here.

    to = ["wandb", "tensorboard"] ──▶ the supervisor runs `diloco track` as a child      docs/trackers.md

Not promised: that another list counts for a run that stands; it is fixed when the run is founded.  `diloco track`
writes to any tracker at any time.
"""

from dataclasses import dataclass

TRACKERS = ("wandb", "trackio", "tensorboard")
PROJECT = "diloco"
FOLDER = "tensorboard"
SAMPLES, MOST_SAMPLES = 8, 64


class LogError(ValueError):
    """[log] cannot be used as it stands."""


@dataclass(frozen=True)
class LogConfig:
    """to: trackers: wandb, trackio, tensorboard.   project: in wandb and trackio ("": WANDB_PROJECT, or diloco).
    folder: of TensorBoard's event files, where the supervisor runs.
    samples: completions per outer step that go into a table, over all replicas; 0 for none.
    """

    to: tuple[str, ...] = ()
    project: str = ""
    folder: str = FOLDER
    samples: int = SAMPLES

    def check(self) -> None:
        """Raises LogError."""
        for name in self.to:
            if name not in TRACKERS:
                raise LogError(f"log.to has {name!r}, which is no tracker. Use any of: {', '.join(TRACKERS)}")
        if not 0 <= self.samples <= MOST_SAMPLES:
            raise LogError(f"log.samples = {self.samples} must be 0 to {MOST_SAMPLES}: completions per outer step")
