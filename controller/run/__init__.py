"""Stores what a training run is resumed from: the run folder, the controller's state, and the checkpoints."""
