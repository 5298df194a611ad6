"""Loads, shards (FSDP2), runs, trains and saves the models of a rank. The code here knows no RPC."""
