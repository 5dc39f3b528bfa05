"""The names of trackers, and what `diloco track` writes to them by default.  No torch here.

Not promised: that a tracker's package is installed (diloco/views/trackers/make.py).
"""

TRACKERS = ("wandb", "trackio", "tensorboard")
PROJECT = "diloco"
FOLDER = "tensorboard"
SAMPLES = 8  # completions per outer step, over all replicas
