"""Commands, carried out by all ranks of a group."""
