"""The models of the roles: one in training, others that are not trained."""
