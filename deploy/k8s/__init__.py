"""The Kubernetes deployment: actor, critic and controller, each in its own pods."""
