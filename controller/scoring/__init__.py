"""Scores responses: from token ids to numbers by reward functions, and adjustments of these numbers."""
