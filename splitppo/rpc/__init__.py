"""The gRPC layer of controller and services: batches as messages, channel options, credentials, errors."""
