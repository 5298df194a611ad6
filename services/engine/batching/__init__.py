"""Divides batch rows into optimizer steps and micro-batches, and computes the weight of each token in the loss."""
