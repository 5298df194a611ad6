"""A stream of facts that fits into no context: PPO teaches a small model what to write down, on a CPU."""
