"""The kill matrix: every process killed at every point of a step, and the run ends as if nothing had happened."""
