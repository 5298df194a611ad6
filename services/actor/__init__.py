"""The actor: policy and rollout backend; by default it hosts the frozen reference."""
