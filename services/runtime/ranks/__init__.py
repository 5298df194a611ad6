"""The command loop: all ranks of a group carry out each command together."""
