"""Kubernetes: actor, critic and controller in pods of their own."""
