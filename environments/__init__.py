"""Conversations of the model with tools and environments of the user's, in child processes that see text only."""
