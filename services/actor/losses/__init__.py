"""The actor's loss: policy losses by name, KL estimates, and their sum."""
