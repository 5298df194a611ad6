"""Validation: the policy on held-out prompts, its metrics, the best step, and early stopping."""
