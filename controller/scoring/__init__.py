"""Scores responses by decoding their token ids and calling reward functions, and adjusts the scores."""
