"""The Docker Compose deployment: actor, critic and controller, each in its own container."""
