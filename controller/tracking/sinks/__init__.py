"""The sinks of a run: each gets every event, and shows or keeps what is for it."""
