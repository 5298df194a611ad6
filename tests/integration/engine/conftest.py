"""Four processes that form groups of ranks for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.ranks import RunRanks


@pytest.fixture(scope="package")
def run() -> Iterator[RunRanks]:
    from tests.support.ranks import rank_processes

    with rank_processes(4) as run:
        yield run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One process computes with as many threads as a rank: several add up in another order, about 1e-6 apart."""
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
