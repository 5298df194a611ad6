"""Rows into micro-batches and optimizer steps, and the weight of each token."""
