"""Predicts a step on other devices, schedules and placements from the phases that a run has measured."""
