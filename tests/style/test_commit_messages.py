"""The faults in messages of commits that `make check` refuses."""

from __future__ import annotations

import pytest

from tools.commit_messages import Commit, faults

BODY = "The reader asks once.\nChecked by the unit tests."


@pytest.mark.parametrize(
    ("subject", "body", "num_lines", "expected"),
    [
        ("actor: retry an update by its key", "", 200, []),
        ("actor: retry an update by its key", BODY, 2000, []),
        ("docs: /proc/meminfo and /dev/shm are named", "", 10, []),
        ("docs: https://example.com/home/page", "", 10, []),
        ("actor: retry an update by its key", "\n", 201, ["no body"]),
        ("Merge branch 'main' of /tmp/w/recovery", "", 0, ["/tmp/w"]),
        ("tests: one home for paths", f"{BODY} Seen in /home/me/runs.", 10, ["/home/me"]),
    ],
)
def test_a_message_names_no_path_and_a_large_change_has_a_body(
    subject: str, body: str, num_lines: int, expected: list[str]
) -> None:
    found = list(faults(Commit("abc1234", subject, body, num_lines)))
    assert len(found) == len(expected)
    assert all(part in fault for part, fault in zip(expected, found, strict=True))
