"""Reads the state of the machine that a process runs on: its cores, memory, GPUs and processes."""
