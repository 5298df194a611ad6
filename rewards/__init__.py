"""The scorers of responses, the manager that asks them, and the processes that they run in."""
