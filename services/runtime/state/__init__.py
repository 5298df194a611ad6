"""The state that the gRPC thread and the command loop of rank 0 share."""
