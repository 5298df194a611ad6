"""The recipe for HH-RLHF, helpful and harmless conversations: PPO with a reward model, on a CPU and on eight GPUs."""
