"""The built-in scoring functions for text, one per kind of data set, and the comparison of mathematical answers."""
