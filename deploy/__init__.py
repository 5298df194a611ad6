"""Running SplitPPO in containers."""
