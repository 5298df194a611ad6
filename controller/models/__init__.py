"""The models of a run as files: their folders, their sizes, and whether the run can use them."""
