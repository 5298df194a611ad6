"""Prompts: data files, rows, chat templates and token ids."""
