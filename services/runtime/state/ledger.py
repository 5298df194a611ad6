"""Records a role's last update (step, request id, reply), saved with the weights, so that no update runs twice.

A group that samples with published weights has a ledger, too: of the version that it holds.
"""

import json
from typing import NamedTuple

from google.protobuf import json_format

from services.runtime.state.command_call import StoredReply
from splitppo.rpc.errors import DataLoss
from splitppo.v1 import worker_pb2

_VERSION = 1


class _Entry(NamedTuple):
    """The step, request id and reply of an update or a save; immutable, so that threads never see half of it."""

    committed_step: int = 0
    request_id: str = ""
    stored: StoredReply = StoredReply("", worker_pb2.CommandResult())


class Ledger:
    """Remembers a role's last update and last save with their replies, to answer repeated commands. Thread-safe.

    `committed_step` is 0 for initial models, and -1 for a group that holds no weights yet.
    """

    def __init__(self, committed_step: int = 0) -> None:
        self._entry = _Entry(committed_step)
        self._saved = _Entry()

    @property
    def committed_step(self) -> int:
        return self._entry.committed_step

    def commit(self, step: int, request_id: str, stored: StoredReply) -> None:
        self._entry = _Entry(step, request_id, stored)

    def reply_of(self, request_id: str) -> StoredReply | None:
        """Returns the reply of the last applied update, marked as replayed, if it has this request id; else None."""
        entry = self._entry
        if not request_id or request_id != entry.request_id:
            return None
        reply = worker_pb2.CommandResult(replayed=True)
        reply.MergeFrom(entry.stored.reply)
        return entry.stored._replace(reply=reply)

    def remember_save(self, request_id: str, stored: StoredReply) -> None:
        """Stores the reply of a SaveCheckpoint that is on disk, to answer repetitions of the same request."""
        self._saved = _Entry(stored.reply.committed_step, request_id, stored)

    def reply_of_save(self, request_id: str) -> StoredReply | None:
        """Returns the reply of the last SaveCheckpoint on disk if it has this request id; else None."""
        saved = self._saved
        return saved.stored if request_id and request_id == saved.request_id else None

    def serialise(self) -> bytes:
        """Returns the ledger's last applied update (step, request id, reply) as JSON, for a checkpoint."""
        entry = self._entry
        content = {
            "version": _VERSION,
            "committed_step": entry.committed_step,
            "request_id": entry.request_id,
            "request_sha256": entry.stored.request_sha256,
            "reply": json_format.MessageToDict(entry.stored.reply, preserving_proto_field_name=True),
        }
        return json.dumps(content, sort_keys=True).encode()

    def restore(self, state: bytes, step: int) -> None:
        """Replaces the ledger by that of a checkpoint (`serialise`); empty `state`: a model that was never trained.

        Raises:
            DataLoss: the checkpoint's ledger cannot be read, or belongs to another step than `step`.
        """
        entry = _read(state) if state else _Entry()
        if entry.committed_step != step:
            raise DataLoss(f"the checkpoint of step {step} holds the ledger of step {entry.committed_step}")
        # A save from here on makes another checkpoint, also of a step that was saved before.
        self._entry = entry
        self._saved = _Entry()


def _read(state: bytes) -> _Entry:
    """Parses a ledger that was saved with the weights; DataLoss if it has another version or is damaged."""
    try:
        entry = json.loads(state)
        if entry["version"] != _VERSION or not isinstance(entry["request_id"], str):
            raise ValueError(f"version {entry['version']}")
        reply = json_format.ParseDict(entry["reply"], worker_pb2.CommandResult())
        stored = StoredReply(str(entry.get("request_sha256", "")), reply)
        return _Entry(entry["committed_step"], entry["request_id"], stored)
    except (ValueError, KeyError, TypeError, json_format.ParseError) as error:
        raise DataLoss(f"the checkpoint's ledger cannot be read: {error}") from error
