"""Scoring of responses: the scorers, the manager that asks them, and the processes in which they run."""
