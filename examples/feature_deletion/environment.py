"""Feature Deletion: the environment is inner.extras.deletion.world's, and needs bubblewrap where replicas run."""

from inner.extras.deletion.world import FeatureDeletion

__all__ = ["FeatureDeletion"]
