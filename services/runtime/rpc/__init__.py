"""The gRPC server of a service, on a thread of rank 0."""
