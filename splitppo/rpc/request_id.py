"""The version of the gRPC protocol, and the request ids of commands."""

import hashlib

# The version grows when a message or a rule of the wire changes in a way that the other side must know.
PROTOCOL_VERSION = 1


def request_id(run_id: str, epoch: int, step: int, method: str, *parts: str | int) -> str:
    """Returns the request id of a command to a worker: equal arguments give the same id, also after a restart.

    `epoch` is the controller's fencing token; `parts` is what else distinguishes commands of one step (slot kind, part,
    model, attempt).
    """
    text = "\x1f".join(map(str, (run_id, epoch, step, method, *parts)))
    return f"{method}-{step}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
