"""The judge: a language model behind an OpenAI-compatible API, whose marks are scores of responses."""
