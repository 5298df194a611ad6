"""Importing a Python file of the user leaves no other file in its folder."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest

from splitppo.config_error import ConfigError
from splitppo.user_file import import_file, line_in, load_from_file


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


@pytest.mark.parametrize("beside", ["names_of_mine.py", "names_of_mine/__init__.py"])
def test_a_module_beside_the_file_that_is_not_found_is_told_how_to_be_found(tmp_path: Path, beside: str) -> None:
    file = tmp_path / "my_reward.py"
    file.write_text("import math\nimport names_of_mine\n", encoding="utf-8")
    reason = "ModuleNotFoundError: No module named 'names_of_mine' (line 2)"
    refused = f"key 'a.path': importing {file} failed: {reason}"
    with pytest.raises(ConfigError) as before:
        import_file(file, "a.path")
    assert str(before.value) == refused
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).touch()
    with pytest.raises(ConfigError) as told:
        import_file(file, "a.path")
    assert str(told.value) == (
        f"{refused}; it lies beside the file, but modules are imported from PYTHONPATH and the folder of the command"
        f" ({Path.cwd()}): set PYTHONPATH={tmp_path.resolve()}"
    )


def test_the_line_is_told_of_a_relative_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def compute_score():\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for path in ("mine.py", "./mine.py", str(tmp_path / "mine.py")):
        function = load_from_file(Path(path), "compute_score", path_key="path", name_key="name")
        with pytest.raises(ZeroDivisionError) as caught:
            function()
        assert line_in(path, caught.value) == ", line 2"
