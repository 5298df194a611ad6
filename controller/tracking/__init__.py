"""What a run tells: metrics, timeline, logs, display, plots."""
