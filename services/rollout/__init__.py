"""Samples responses with the policy: the command Generate, its backends (Hugging Face, vLLM), and the rollout group."""
