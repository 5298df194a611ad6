"""PPO's arithmetic on the rollouts of one step: rewards, KL, advantages, returns; in numpy alone."""
