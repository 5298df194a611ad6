"""The controller: one asyncio process without torch, which drives PPO by calls to the worker groups."""
