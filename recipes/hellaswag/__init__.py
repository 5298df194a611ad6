"""HellaSwag, endings of everyday scenes: rows of a real data set, on a CPU and on eight GPUs."""
