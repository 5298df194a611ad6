"""Sorting letters: the quickstart."""
