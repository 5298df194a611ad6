"""Hugging Face models in the engine: loading, attention, forward passes, log-probs."""
