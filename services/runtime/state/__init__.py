"""The state that the gRPC thread and the command loop of a rank 0 share."""
