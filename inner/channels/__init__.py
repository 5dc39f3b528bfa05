"""The training signals beside the reward: hints and lessons, the teacher, pairs, turn scores."""
