"""Reads a verl configuration or launch script and says it in this project's keys."""
