"""The ledger: which step is committed, by which request, and what was answered. Stored with the weights."""

from __future__ import annotations

import json
import threading
from typing import Any

from google.protobuf import json_format

from splitppo.rpc.errors import DataLoss
from splitppo.v1 import worker_pb2

_VERSION = 1


class Ledger:
    """The last committed request of a role and its reply; one entry, so that "applied" and "saved" cannot differ.

    Thread-safe: written by the main thread, read by the gRPC thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._committed_step = 0
        self._request_id = ""
        self._reply = worker_pb2.CommandResult()

    @property
    def committed_step(self) -> int:
        with self._lock:
            return self._committed_step

    def commit(self, step: int, request_id: str, reply: worker_pb2.CommandResult) -> None:
        """Enters an applied update."""
        with self._lock:
            self._committed_step, self._request_id, self._reply = step, request_id, reply

    def reply_of(self, request_id: str) -> worker_pb2.CommandResult | None:
        """The stored reply, marked as replayed, if this request was the last one applied."""
        with self._lock:
            if not request_id or request_id != self._request_id:
                return None
            reply = worker_pb2.CommandResult()
            reply.CopyFrom(self._reply)
            reply.replayed = True
            return reply

    def serialise(self) -> bytes:
        """The entry as JSON, for a checkpoint."""
        with self._lock:
            entry = {
                "version": _VERSION,
                "committed_step": self._committed_step,
                "request_id": self._request_id,
                "reply": json_format.MessageToDict(self._reply, preserving_proto_field_name=True),
            }
        return json.dumps(entry, sort_keys=True).encode()

    def restore(self, state: bytes, step: int) -> None:
        """Takes the entry of a checkpoint; no bytes stand for a model that was never trained.

        Raises:
            DataLoss: the entry cannot be read, or belongs to another step than `step`.
        """
        entry: dict[str, Any] = _read(state) if state else {"committed_step": 0, "request_id": "", "reply": {}}
        if entry["committed_step"] != step:
            raise DataLoss(f"the checkpoint of step {step} holds the ledger of step {entry['committed_step']}")
        reply = json_format.ParseDict(entry["reply"], worker_pb2.CommandResult())
        self.commit(step, entry["request_id"], reply)


def _read(state: bytes) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(state)
        if entry["version"] != _VERSION or not isinstance(entry["request_id"], str):
            raise ValueError(f"version {entry['version']}")
        json_format.ParseDict(entry["reply"], worker_pb2.CommandResult())
    except (ValueError, KeyError, TypeError, json_format.ParseError) as error:
        raise DataLoss(f"the checkpoint's ledger cannot be read: {error}") from error
    return entry
