"""Loads, shards (FSDP2), runs, trains and saves the models of a rank. Nothing here uses gRPC."""
