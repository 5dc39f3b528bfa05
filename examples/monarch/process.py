"""Scores of single turns: how many teachers would have acted alike? The replica's TeacherReplayActors ask them."""

from inner import ConsensusScore
from inner.extras.monarch import ask_pool

score = ConsensusScore(ask_pool, shape="weighted")
