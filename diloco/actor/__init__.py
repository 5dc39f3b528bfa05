"""Actors: processes that sample rollouts ahead of the replicas.   places.py: the choice.   actor.py: the process."""

from diloco.actor.actor import main as main  # launchers start `diloco.actor:main`
