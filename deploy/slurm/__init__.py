"""Slurm: a job that starts all groups and the controller."""
