"""Tests of the trainer, its channels, losses and worlds, beside TRL and other references."""
