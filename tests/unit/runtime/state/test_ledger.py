"""The ledger of applied updates."""

from __future__ import annotations

import pytest

from services.runtime.state.command_call import StoredReply
from services.runtime.state.ledger import Ledger
from splitppo.rpc.errors import DataLoss
from splitppo.v1 import worker_pb2

REPLY = worker_pb2.CommandResult(
    engine_time=worker_pb2.EngineTime(started_unix_ns=1_795_223_961_506_405_838, finished_unix_ns=2**60),
    metrics={"loss": 0.1, "grad_norm": float("nan")},
    committed_step=3,
)


def test_only_the_last_request_is_replayed() -> None:
    ledger = Ledger()
    ledger.commit(1, "first", StoredReply("", worker_pb2.CommandResult()))
    ledger.commit(2, "second", StoredReply("", worker_pb2.CommandResult(metrics={"loss": 1.0})))
    assert ledger.reply_of("first") is None
    replayed = ledger.reply_of("second")
    assert replayed is not None
    assert replayed.reply.replayed
    assert dict(replayed.reply.metrics) == {"loss": 1.0}


def test_nothing_is_replayed_before_the_first_commit() -> None:
    assert Ledger().reply_of("") is None


def test_a_group_that_gets_its_weights_later_begins_before_step_0_and_replays_its_last_version() -> None:
    ledger = Ledger(committed_step=-1)
    assert (ledger.committed_step, ledger.reply_of("")) == (-1, None)
    for version in (0, 4, 2):
        ledger.commit(version, f"sync-{version}", StoredReply("", worker_pb2.CommandResult(committed_step=version)))
    assert (ledger.committed_step, ledger.reply_of("sync-4")) == (2, None)
    replayed = ledger.reply_of("sync-2")
    assert replayed is not None
    assert replayed.reply.committed_step == 2


def test_a_checkpoint_brings_back_step_request_and_reply() -> None:
    saved = Ledger()
    saved.commit(3, "update-3", StoredReply("", REPLY))
    loaded = Ledger()
    loaded.restore(saved.serialise(), 3)
    replayed = loaded.reply_of("update-3")
    assert loaded.committed_step == 3
    assert replayed is not None
    assert replayed.reply.engine_time == REPLY.engine_time
    assert replayed.reply.metrics["loss"] == 0.1
    assert replayed.reply.metrics["grad_norm"] != replayed.reply.metrics["grad_norm"]


def test_the_initial_model_has_an_empty_ledger() -> None:
    ledger = Ledger()
    ledger.commit(3, "update-3", StoredReply("", REPLY))
    ledger.restore(b"", 0)
    assert ledger.committed_step == 0
    assert ledger.reply_of("update-3") is None


@pytest.mark.parametrize("state", [b"", b"{}", b"not json", b'{"version": 2}', b'{"version": 1, "request_id": 5}'])
def test_an_unreadable_entry_is_refused_and_changes_nothing(state: bytes) -> None:
    ledger = Ledger()
    ledger.commit(2, "update-2", StoredReply("", worker_pb2.CommandResult()))
    with pytest.raises(DataLoss):
        ledger.restore(state, 3)
    assert ledger.committed_step == 2


def test_the_entry_of_another_step_is_refused() -> None:
    saved = Ledger()
    saved.commit(3, "update-3", StoredReply("", REPLY))
    with pytest.raises(DataLoss, match="step 4 holds the ledger of step 3"):
        Ledger().restore(saved.serialise(), 4)


def test_a_checkpoint_brings_back_which_request_it_was() -> None:
    saved, loaded = Ledger(), Ledger()
    saved.commit(3, "update-3", StoredReply("d" * 64, REPLY))
    loaded.restore(saved.serialise(), 3)
    assert loaded.reply_of("update-3") == saved.reply_of("update-3")


def test_a_checkpoint_of_a_version_without_digests_can_be_loaded() -> None:
    ledger = Ledger()
    ledger.restore(
        b'{"version": 1, "committed_step": 3, "request_id": "update-3", "reply": {"committed_step": "3"}}', 3
    )
    replayed = ledger.reply_of("update-3")
    assert replayed is not None
    assert (replayed.request_sha256, replayed.reply.committed_step) == ("", 3)
