"""Codec, channel and server options, errors <-> status, retry."""
