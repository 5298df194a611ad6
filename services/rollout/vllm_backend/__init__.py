"""The rollout backend that samples with vLLM, inside the actor's processes."""
