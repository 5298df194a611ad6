"""The processes of a worker group: how they are started, find each other, and end together."""
