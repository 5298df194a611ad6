"""The sections of the YAML configuration file as pydantic models, one module for each section."""
