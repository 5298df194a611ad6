"""What is written down about callers that are refused."""

from __future__ import annotations

import pytest

from services.shell.gate import RefusalLog


def test_a_refusal_names_who_what_and_why(caplog: pytest.LogCaptureFixture) -> None:
    RefusalLog().refused("ipv4:10.0.0.9:5", "/splitppo.v1.WorkerService/PutBatch", "wrong token")
    assert [record.getMessage() for record in caplog.records] == [
        "refused wrong token: ipv4:10.0.0.9:5 calls /splitppo.v1.WorkerService/PutBatch"
    ]


def test_a_flood_does_not_fill_the_log_and_what_was_left_out_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = RefusalLog(lambda: now[0])
    for _ in range(1000):
        log.refused("peer", "/method", "no token")
    assert len(caplog.records) == 10
    now[0] += 60.0
    log.refused("peer", "/method", "no token")
    assert len(caplog.records) == 11
    assert caplog.records[-1].getMessage().endswith("(990 refusals before this one were not written down)")
