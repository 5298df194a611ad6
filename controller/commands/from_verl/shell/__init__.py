"""Asks bash, in a sandbox, what a launch script passes to verl."""
