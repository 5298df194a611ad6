"""Answers for comparisons: the configuration of a run, and how it answered one prompt again and again."""
