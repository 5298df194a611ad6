"""Rules that must hold between the sections of a configuration."""
