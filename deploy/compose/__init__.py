"""Docker Compose: actor, critic and controller in a container each."""
