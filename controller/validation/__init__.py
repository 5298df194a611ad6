"""Validation: the policy answers held-out prompts; metrics, best step and early stopping follow from the scores."""
