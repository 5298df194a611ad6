"""Lines of the product, and their folders."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest

from tools.product_lines import ALL, lines_of_folders, main, num_lines

SOURCE = '''"""A docstring of three lines,

the second of which is blank.
"""

import json  # a comment beside code

# A comment alone.
TEXT = """
of three
lines"""


class A:
    """A docstring of one line."""

    key: int = 1
    """A docstring of an attribute."""

    def b(self) -> str:
        """Returns
        something."""
        return (
            TEXT
        )
'''


def test_comments_docstrings_and_blank_lines_do_not_count() -> None:
    assert num_lines(SOURCE) == 1 + 3 + 1 + 1 + 1 + 3


def test_a_file_counts_for_two_levels_of_folders_and_generated_code_for_none() -> None:
    files = {"a/b/c/d.py": "x = 1", "a/e.py": "x = 1\ny = 2", "a/v1/f_pb2.py": "x = 1", "a/v1/f_pb2_grpc.py": "x = 1"}
    counted = lines_of_folders((PurePosixPath(path), source) for path, source in files.items())
    assert counted == {ALL: 3, "a": 3, "a/b": 1}


def test_javascript_counts_and_what_others_wrote_does_not() -> None:
    ours = "// about\n\nlet x = 1; // beside\n  // alone\nx += 1;\n"
    files = {"a/static/b.js": ours, "a/static/vendor/c.js": "let y;"}
    counted = lines_of_folders((PurePosixPath(path), source) for path, source in files.items())
    assert counted == {ALL: 2, "a": 2, "a/static": 2}


def test_an_unknown_commit_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ref", "there-is-no-such-commit"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ")
    assert "there-is-no-such-commit" in shown.err
