"""Tasks: for each a script that prepares its data, one configuration per hardware, and what to expect."""
