"""The log lines about callers that are refused."""

from __future__ import annotations

import logging

import pytest

from services.runtime.rpc.auth_interceptor import LineLimit


def test_a_flood_does_not_fill_the_log_and_what_was_left_out_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    log = logging.getLogger("tests.flooded")
    log.addFilter(LineLimit(lambda: now[0]))
    for _ in range(1000):
        log.warning("refused %s", "peer")
    assert len(caplog.records) == 10
    now[0] += 60.0
    log.warning("refused %s", "peer")
    log.warning("refused %s", "peer")
    assert [record.getMessage() for record in caplog.records[9:]] == [
        "refused peer",
        "refused peer (990 lines like it before were not written down)",
        "refused peer",
    ]
