"""Makes one file of runs that shows them without a server."""
