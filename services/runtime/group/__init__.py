"""Starts the processes of a worker group with torchrun, connects them with each other, and ends them together."""
