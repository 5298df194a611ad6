"""The command `python -m controller doctor`: finds faults of a run, its worker groups and connections; gives advice."""
