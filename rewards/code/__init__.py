"""Scores code answers: runs the programs of responses in sandboxes against test cases."""
