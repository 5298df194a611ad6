"""The judge: a language model behind an OpenAI-compatible API that scores responses."""
