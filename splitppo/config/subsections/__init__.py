"""The sections inside other sections of the YAML configuration file, as pydantic models."""
