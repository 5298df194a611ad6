"""The recipe for GSM8K, grade-school mathematics: PPO on a real data set, on a CPU and on eight GPUs."""
