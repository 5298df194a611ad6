"""Actor, critic and controller in a container each, by Docker Compose."""
