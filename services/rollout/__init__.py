"""Rollout backends: engines that sample responses, behind one protocol."""
