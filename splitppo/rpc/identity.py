"""Who calls, and which call it is."""

from __future__ import annotations

import hashlib

# Raised when a message or a rule of the wire changes in a way that the other side must know.
PROTOCOL_VERSION = 1


def request_id(run_id: str, epoch: int, step: int, method: str, *parts: str | int) -> str:
    """Names a command: the same arguments give the same id, in this process or after a restart.

    Args:
        run_id: the run.
        epoch: the controller's fencing token.
        step: the step that the command works on.
        method: name of the RPC.
        parts: what else tells two commands of one step apart (slot kind, part, model, attempt).
    """
    text = "\x1f".join(str(field) for field in (run_id, epoch, step, method, *parts))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return f"{method}-{step}-{digest}"
