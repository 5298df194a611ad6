"""Generated pages agree with the code."""

from __future__ import annotations

import pytest

from tools.docs import PAGES, main


@pytest.mark.parametrize("page", PAGES)
def test_the_page_is_up_to_date(page: str) -> None:
    assert main([page, "--check"]) == 0
