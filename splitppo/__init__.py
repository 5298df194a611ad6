"""The code that both sides of the wire share: contract, batches, configuration, RPC.

It needs numpy, and never torch.
"""

import os

__version__ = "0.1.0"

# gRPC reads this when it is imported. No process of ours goes on in gRPC behind a fork, and at each start of a child
# gRPC would print that it skips its handlers for that.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
