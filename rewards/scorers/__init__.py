"""The built-in scorers of text, one per kind of data set, and the comparison of mathematical answers."""
