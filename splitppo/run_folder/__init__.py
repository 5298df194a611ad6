"""The run folder: every file of a run, with its writer and its reader, and the table of metrics. It knows no wire.

What trackers need has the standard library alone: any Python can run them.
"""
