"""What actor and critic have in common: a model in training."""
