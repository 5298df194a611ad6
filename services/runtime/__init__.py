"""The code that the actor, critic, reward and rollout services share: launch, command queue, gRPC server, ledger."""
