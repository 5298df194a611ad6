"""The controller's side of the worker groups: processes, gRPC clients, supervision, and the rules of recovery."""
