"""Scores of single turns: how many of the teachers would have done the same?  The replica's TeacherReplayActors ask."""

from inner import ConsensusScore
from inner.extras.monarch import ask_pool

score = ConsensusScore(ask_pool, shape="weighted")
