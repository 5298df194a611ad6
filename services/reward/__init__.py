"""The reward group: frozen models alone, in a group of their own."""
