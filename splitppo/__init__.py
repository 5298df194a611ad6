"""The code that controller and services share: gRPC contract, batches, configuration.

This package needs numpy, and never torch.
"""

import os

__version__ = "0.1.0"

# gRPC reads this variable when it is imported. None of our processes uses gRPC after a fork, and without the variable
# gRPC would print at each start of a child that it skips its handlers for forks.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
