"""Notices that a group has failed, and ends it with the cause."""
