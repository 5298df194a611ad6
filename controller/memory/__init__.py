"""How much memory the ranks of a run need, estimated before anything starts."""
