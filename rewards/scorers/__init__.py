"""The built-in scorers of text, one per kind of data set, and how they compare mathematics."""
