"""`python -m controller doctor`: what is wrong with a run, its groups and its wire, and what to do."""
