"""A person's own training script as a replica: a callback for Transformers' and TRL's trainers."""
