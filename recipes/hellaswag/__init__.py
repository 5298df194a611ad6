"""The recipe for HellaSwag, endings of everyday scenes: PPO on a real data set, on a CPU and on eight GPUs."""
