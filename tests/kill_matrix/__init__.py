"""The kill matrix: every process is killed at every point of a step, and the run ends as without the kill."""
