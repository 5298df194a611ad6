"""Geometry problems with a figure each: rows of Geometry3K, and GRPO with Qwen2.5-VL-7B."""
