"""The state of a service that the gRPC thread and the command loop of rank 0 share: batches, commands, ledger."""
