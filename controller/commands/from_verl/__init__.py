"""Translates a verl configuration or launch script into a SplitPPO configuration."""
