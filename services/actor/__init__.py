"""The actor: policy, frozen reference and rollout backend."""
