"""Sections inside sections of the YAML file."""
