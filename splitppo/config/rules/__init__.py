"""Rules that must hold between keys of different sections of a configuration."""
