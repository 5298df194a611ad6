"""The recipe for MATH, competition mathematics: PPO on a real data set, on a CPU and on eight GPUs."""
