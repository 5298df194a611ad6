"""Starts, calls and watches the worker groups (processes with the models), and restarts groups that failed."""
