"""Feature Deletion: the environment is inner.worlds.deletion.world's, and needs bubblewrap where replicas run."""

from inner.worlds.deletion.world import FeatureDeletion

__all__ = ["FeatureDeletion"]
