"""Sampling with the policy itself."""
