"""The gRPC thread of a rank 0."""
