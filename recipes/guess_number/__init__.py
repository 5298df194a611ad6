"""A conversation with an environment: PPO teaches a small model to find a hidden number in five guesses, on a CPU."""
