"""The trained models and what serves them: one torchrun group per role."""
