"""The wire: batches, channel and server options, credentials, and errors as gRPC status."""
