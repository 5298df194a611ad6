"""Models that compute and train: loading, FSDP2, packing, optimizer, checkpoints. The engine knows no RPC."""
