"""Scores responses: the scorers, the manager that calls them, and the processes in which they run."""
