"""Actors: processes that sample rollouts ahead of the replicas.   places.py: which.   actor.py: how."""

from diloco.actor.actor import main as main  # launchers start `diloco.actor:main`
