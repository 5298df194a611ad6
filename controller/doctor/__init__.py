"""`python -m controller doctor`: finds faults of a run, its groups and its connections, and gives advice."""
