"""A callback for trainers of Transformers and TRL, which makes your own script a replica."""
