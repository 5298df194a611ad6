"""Importing a Python file of the user leaves no other file in its folder."""

from __future__ import annotations

import importlib
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
def test_a_module_beside_the_file_is_imported_also_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: str
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "names_of_mine", raising=False)
    file = tmp_path / "my_reward.py"
    late = "def late():\n    from names_of_theirs import NAME\n    return NAME\n"
    file.write_text(f"from names_of_mine import NAME\n{late}", encoding="utf-8")
    refused = f"key 'a.path': importing {file} failed: ModuleNotFoundError: No module named 'names_of_mine' (line 1)"
    with pytest.raises(ConfigError) as missing:
        import_file(file, "a.path")
    assert str(missing.value) == refused
    (tmp_path / beside).parent.mkdir(exist_ok=True)
    (tmp_path / beside).write_text("NAME = 'mine'\n")
    importlib.invalidate_caches()
    module = import_file(file, "a.path")
    (tmp_path / "names_of_theirs.py").write_text("NAME = 'theirs'\n")
    importlib.invalidate_caches()
    assert (module.NAME, module.late()) == ("mine", "theirs")


def test_two_folders_with_modules_of_one_name_are_refused_where_the_wrong_one_would_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "names_twice.py").write_text(f"NAME = {name!r}\n")
        (tmp_path / name / "agent.py").write_text("from names_twice import NAME\n")
        (tmp_path / name / "other.py").touch()
    assert import_file(tmp_path / "one" / "agent.py", "a.path").NAME == "one"
    import_file(tmp_path / "two" / "other.py", "b.path")
    with pytest.raises(ConfigError) as refused:
        import_file(tmp_path / "two" / "agent.py", "b.path")
    assert str(refused.value) == (
        f"key 'b.path': {tmp_path}/two/agent.py imports names_twice, which lies beside it, but in this process that"
        f" name is {tmp_path}/one/names_twice.py; give one of them another name"
    )


def test_the_line_is_told_of_a_relative_path_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("def compute_score():\n    return 1 / 0\n")
    monkeypatch.chdir(tmp_path)
    for path in ("mine.py", "./mine.py", str(tmp_path / "mine.py")):
        function = load_from_file(Path(path), "compute_score", path_key="path", name_key="name")
        with pytest.raises(ZeroDivisionError) as caught:
            function()
        assert line_in(path, caught.value) == ", line 2"
