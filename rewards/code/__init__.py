"""Code answers, run in sandboxes against their test cases."""
