"""The record of a run: metrics, timeline, logs, display, plots."""
