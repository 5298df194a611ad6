"""Deployments of SplitPPO: Docker Compose, Kubernetes, Slurm, and several hosts."""
