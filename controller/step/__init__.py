"""One PPO step as the controller runs it: its rollouts, the calls to the workers, and the context that they share."""
