"""The reward service: a group of processes that hosts frozen models alone, and trains nothing."""
