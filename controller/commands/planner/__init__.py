"""Predicts the time of a training step on other devices, schedules and placements, from measured phases of a run."""
