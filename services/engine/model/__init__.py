"""Prepares Hugging Face models for training: loading, attention, forward passes, log-probs."""
