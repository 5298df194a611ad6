"""The asyncio process that drives the PPO dataflow. No torch."""
