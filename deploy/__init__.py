"""Starts SplitPPO under Docker Compose, Kubernetes and Slurm, and on several hosts."""
