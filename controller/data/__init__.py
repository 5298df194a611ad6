"""Prompts: files, rows, chat templates, token ids."""
