"""The run folder, the controller's state and the checkpoints, from which a training run is resumed."""
