"""Compares every causal language model of transformers, built small, with what the engine computes with it."""
