"""Prompts: reads data files, renders chat templates, converts text to token ids, and orders prompts."""
