"""The models of the roles: one model in training, and models that are not trained."""
