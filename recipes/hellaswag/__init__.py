"""HellaSwag, endings of everyday scenes: real rows, on a CPU and on eight GPUs."""
