"""Bytes on a TCP connection that are not gRPC, from noise to hostile frames of HTTP/2."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_SETTINGS = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
_WAIT_S = 0.02


def bare_bytes(draw: random.Random) -> tuple[str, bytes]:
    """(kind, what is sent)."""
    match draw.randrange(7):
        case 0:
            return "noise", draw.randbytes(draw.randrange(4096))
        case 1:
            return "HTTP/1", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
        case 2:
            return "TLS hello", b"\x16\x03\x01" + draw.randbytes(draw.randrange(600))
        case 3:
            return "preface, then noise", _PREFACE + draw.randbytes(draw.randrange(2048))
        case 4:
            return "preface, then silence", _PREFACE[: draw.randrange(len(_PREFACE) + 1)]
        case 5:
            return "settings, many times", _PREFACE + _SETTINGS * draw.randrange(1000)
        case _:
            return "frames", _PREFACE + _SETTINGS + b"".join(_frame(draw) for _ in range(draw.randrange(20)))


def _frame(draw: random.Random) -> bytes:
    """A frame of any type, flags and stream, whose length may be a lie."""
    payload = draw.randbytes(draw.randrange(64))
    length = draw.choice((len(payload), len(payload), 0, (1 << 24) - 1))
    stream = draw.choice((0, 1, 3, 5, (1 << 31) - 1))
    return (
        length.to_bytes(3, "big")
        + bytes([draw.randrange(12), draw.randrange(256)])
        + stream.to_bytes(4, "big")
        + payload
    )


def send(address: str, content: bytes) -> str:
    """Sends it and hangs up; what became of the connection."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10.0) as connection:
        connection.settimeout(_WAIT_S)
        with suppress(OSError):
            connection.sendall(content)
            while answer := connection.recv(65536):
                if len(answer) < 65536:
                    break
            return "answered" if answer else "closed"
        return "left alone"
