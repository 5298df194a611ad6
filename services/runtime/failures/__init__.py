"""Notices that a rank of a group has failed or hangs, and ends the group with an error that names the cause."""
