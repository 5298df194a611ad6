"""Compares the SplitPPO versions of controller and worker, which must be equal.

A client or worker of another project sends no software version: only its protocol version is compared.
"""

from splitppo import __version__
from splitppo.rpc.request_id import PROTOCOL_VERSION
from splitppo.v1 import worker_pb2


def why_versions_differ(
    here: str, peer: str, greeting: worker_pb2.HandshakeRequest | worker_pb2.HandshakeResponse
) -> str:
    """Returns an error sentence if the versions of controller and worker differ; "" if they may work together.

    Two versions of SplitPPO may have different formulas and defaults with the same protocol, so the same protocol is
    not enough.

    Args:
        here: who compares, e.g. "this worker".
        peer: who has sent the greeting, e.g. "the controller".
        greeting: a message with `protocol_version` and `software_version`.
    """
    theirs = greeting.software_version
    protocol = greeting.protocol_version
    if protocol == PROTOCOL_VERSION and theirs in ("", __version__):
        return ""
    return (
        f"{peer} has version {theirs or 'unknown'} (protocol {protocol}), {here} has version {__version__} (protocol"
        f" {PROTOCOL_VERSION}): install the same version, or run the same image, on both sides"
    )
