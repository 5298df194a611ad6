"""Computes the actor's loss: policy losses by name, KL estimates, entropy, and their weighted sum."""
