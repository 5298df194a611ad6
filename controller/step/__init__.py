"""One step: its rollouts, the calls that compute with them, and the context that they share."""
