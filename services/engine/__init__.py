"""What every trained model is: load, FSDP2, packing, optimizer, checkpoint. Knows no RPC."""
