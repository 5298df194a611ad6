"""Runs the commands of a service on all ranks of its group: command loops, messages between ranks, sharding."""
