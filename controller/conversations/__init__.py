"""Conversations of several turns: what the model talks with, and what follows its turns."""
