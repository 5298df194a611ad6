"""What every service is: launch, command queue, gRPC server, ledger."""
