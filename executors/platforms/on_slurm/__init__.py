"""Replicas as Slurm jobs, through submitit."""
