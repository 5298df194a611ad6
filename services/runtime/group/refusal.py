"""Tells torchrun by which sentence a rank refuses its input, if torchrun has forked the rank and can read it."""

import json
import socket
from contextlib import suppress

_channel: socket.socket | None = None


def report_refusals_to(channel: socket.socket) -> None:
    """Sets the socket on which this rank's torchrun reads."""
    global _channel
    _channel = channel


def report_refusal(sentence: str) -> None:
    """Tells torchrun the sentence; does nothing in a rank that was not forked."""
    if _channel is not None:
        with suppress(OSError):  # torchrun has ended
            _channel.sendall(json.dumps({"refusal": sentence}).encode())
