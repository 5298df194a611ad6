"""A Hugging Face model, as the engine computes with it."""
