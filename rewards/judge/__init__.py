"""The judge, a scorer: asks a language model behind an OpenAI-compatible API for marks of responses."""
