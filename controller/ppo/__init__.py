"""What PPO computes from a step's rollouts, in numpy alone."""
