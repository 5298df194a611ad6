"""The files from which a run is resumed: its folder, state and checkpoints."""
