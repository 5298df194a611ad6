"""Scores of responses: the step from text to numbers, and adjustments of the numbers."""
