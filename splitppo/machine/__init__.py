"""The machine that a process runs on: its cores, memory, GPUs and processes."""
