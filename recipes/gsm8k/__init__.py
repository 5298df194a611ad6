"""GSM8K, grade-school mathematics: rows of a real data set, on a CPU and on eight GPUs."""
