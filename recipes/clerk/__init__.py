"""A conversation with a reward for each turn: PPO teaches a small model which entry a clerk is asked for, on a CPU."""
