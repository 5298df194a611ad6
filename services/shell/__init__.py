"""What every service is: launch, mailbox, gRPC server, ledger."""
