"""Four processes that form groups of ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.ranks import RunRanks, rank_processes


@pytest.fixture(scope="package")
def run() -> Iterator[RunRanks]:
    with rank_processes(4) as run:
        yield run
