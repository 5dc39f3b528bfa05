"""The names of trackers and the defaults of `diloco track`.  This file does not import torch.

Not promised: that a tracker's package is installed (diloco/views/trackers/make.py).
"""

TRACKERS = ("wandb", "trackio", "tensorboard")
PROJECT = "diloco"
FOLDER = "tensorboard"
SAMPLES = 8  # completions per outer step, over all replicas
