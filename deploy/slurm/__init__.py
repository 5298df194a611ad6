"""The Slurm deployment: one job that starts all worker groups and the controller."""
