"""Codec, channel and server options, credentials, errors <-> status."""
