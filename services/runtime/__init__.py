"""The part that all services share: launch, command queue, gRPC server, ledger."""
