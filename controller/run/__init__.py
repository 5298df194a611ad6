"""What a run leaves on disk and comes back from: its folder, state and checkpoints."""
