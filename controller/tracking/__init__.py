"""Records a run: metrics, timeline, log files, terminal display, plots, and external trackers such as W&B."""
