"""Validation: responses to held-out prompts, their metrics, the best step, and early stopping."""
