"""Estimates the memory of the ranks of a run, before anything starts."""
