"""The rollout backend that samples with the policy's own Hugging Face model."""
