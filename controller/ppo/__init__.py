"""PPO's arithmetic on a step's rollouts, in numpy alone."""
