"""The environment of deletion.py: inner.extras.deletion.world's, which asks only once for the verdict on equal files.

Not promised: a cache that outlives its process.
"""

from inner.extras.deletion.world import FeatureDeletion

VERDICTS: dict[object, float] = {}  # (task, files) -> reward: a verdict depends on nothing else


class World(FeatureDeletion):
    def get_reward(self) -> float:
        key = (self._task.name, tuple(sorted(self._files.items())))
        if key not in VERDICTS:
            VERDICTS[key] = super().get_reward()
        return VERDICTS[key]
