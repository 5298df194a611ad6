"""The smallest run with images: PPO or GRPO teaches a tiny Qwen2.5-VL to read digits, on a CPU."""
