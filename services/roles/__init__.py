"""What the roles have in common: a model in training, models that are not trained."""
