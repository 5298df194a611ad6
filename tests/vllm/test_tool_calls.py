"""The table of calls that unit tests compare our parsers with holds vLLM's answers."""

from __future__ import annotations

import json

import pytest

from tests.support.tool_calls import TABLE, table

pytestmark = pytest.mark.vllm


def test_the_table_holds_vllms_answers() -> None:
    """`python -m tests.support.tool_calls` writes it anew."""
    assert json.loads(TABLE.read_text()) == json.loads(json.dumps(table()))
