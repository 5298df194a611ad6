"""Kills at random moments, over a long run, of ranks and of the controller; and what a killed controller leaves."""
