"""Starting the groups under Slurm."""
