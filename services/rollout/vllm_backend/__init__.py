"""Sampling with vLLM, inside the actor's processes."""
