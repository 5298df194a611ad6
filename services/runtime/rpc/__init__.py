"""The gRPC server of a service, which runs on a thread of rank 0: its RPCs, tokens, limits, health, reflection."""
