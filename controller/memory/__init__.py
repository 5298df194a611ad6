"""Estimates the GPU or main memory of each rank of a run, before anything starts."""
