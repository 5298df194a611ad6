"""Importing a Python file of the user leaves no other file in its folder."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest

from splitppo.config_error import ConfigError
from splitppo.user_file import load_from_file


@pytest.mark.parametrize("last_line", ["", "raise RuntimeError('not today')"])
def test_an_import_leaves_nothing_in_the_users_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last_line: str
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    beside = f"beside_{len(last_line)}"
    (tmp_path / f"{beside}.py").touch()
    file = tmp_path / "my_reward.py"
    file.write_text(f"import {beside}\ndef compute_score(): ...\n{last_line}\n", encoding="utf-8")
    with suppress(ConfigError):  # the last line's
        load_from_file(file, "compute_score", path_key="path", name_key="name")
    assert {entry.name for entry in tmp_path.iterdir()} == {f"{beside}.py", "my_reward.py"}
    assert not sys.dont_write_bytecode
