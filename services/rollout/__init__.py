"""Samples responses with the policy: the command Generate, and its backends (Hugging Face, vLLM)."""
