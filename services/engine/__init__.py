"""Models that compute and train: loading, FSDP2, packing, optimizer, checkpoints. Knows no RPC."""
