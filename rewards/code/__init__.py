"""Runs code answers in sandboxes against their test cases."""
