"""The code that the actor, critic and reward services share: launch, command queue, gRPC server, ledger."""
