"""MATH, competition mathematics: real rows, on a CPU and on eight GPUs."""
