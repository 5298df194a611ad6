"""The actor: policy, frozen reference and rollout engine."""
