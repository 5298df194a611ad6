"""HH-RLHF, helpful and harmless conversations: real rows and a reward model, on a CPU and on eight GPUs."""
