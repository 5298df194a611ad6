"""Versions that work together, by both sides of a handshake."""

from __future__ import annotations

import pytest

from splitppo import __version__
from splitppo.rpc.request_id import PROTOCOL_VERSION
from splitppo.rpc.software_version import why_versions_differ
from splitppo.v1 import worker_pb2

MESSAGES = [worker_pb2.HandshakeRequest, worker_pb2.HandshakeResponse]


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize("version", [__version__, ""], ids=["the same", "none of SplitPPO's"])
def test_these_work_together(message: type, version: str) -> None:
    greeting = message(protocol_version=PROTOCOL_VERSION, software_version=version)
    assert why_versions_differ("here", "there", greeting) == ""


@pytest.mark.parametrize("message", MESSAGES)
@pytest.mark.parametrize(
    ("protocol", "version", "shown"),
    [
        (PROTOCOL_VERSION, "0.0.9", "there has version 0.0.9 (protocol 1)"),
        (99, __version__, f"there has version {__version__} (protocol 99)"),
        (99, "", "there has version unknown (protocol 99)"),
    ],
)
def test_these_do_not_and_the_sentence_has_both_and_what_to_do(
    message: type, protocol: int, version: str, shown: str
) -> None:
    greeting = message(protocol_version=protocol, software_version=version)
    assert why_versions_differ("here", "there", greeting) == (
        f"{shown}, here has version {__version__} (protocol {PROTOCOL_VERSION}):"
        " install the same version, or run the same image, on both sides"
    )
