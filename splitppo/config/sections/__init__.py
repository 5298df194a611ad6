"""The sections of the YAML file, one module for each."""
