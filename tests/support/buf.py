"""The command line tool buf: lints proto/, finds breaking changes, calls workers. It is a development tool."""

from __future__ import annotations

import shutil
import sysconfig

import pytest

_FOUND = shutil.which("buf", path=sysconfig.get_path("scripts")) or shutil.which("buf")
BUF = _FOUND or "buf"
needs_buf = pytest.mark.skipif(_FOUND is None, reason="needs buf: make setup-dev")
