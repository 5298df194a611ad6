"""Recipes: for each task a script that prepares its data, a configuration for each hardware, and what to expect."""
