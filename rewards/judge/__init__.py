"""A language model behind an OpenAI-compatible API as a source of scores."""
