"""The files of a run, from which it comes back: its folder, state and checkpoints."""
