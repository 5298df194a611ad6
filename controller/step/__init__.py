"""One PPO step as the controller runs it: makes its rollouts, calls the worker groups, and checks what they return."""
