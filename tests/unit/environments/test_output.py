"""The file of what tools and environments print."""

from __future__ import annotations

import os
from pathlib import Path

from environments.output import MAX_BYTES, bounded_output, shorten
from tests.support.groups import wait_until


def test_a_long_file_keeps_its_end_from_a_whole_line_and_says_what_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "environments.log"
    file.write_bytes(b"".join(b"line %d\n" % number for number in range(200_000)))
    num_bytes = file.stat().st_size
    with file.open("ab+") as opened:
        shorten(opened.fileno(), num_bytes)
        assert file.stat().st_size == num_bytes
        shorten(opened.fileno(), 1 << 20)
        opened.write(b"next\n")
    head, first, *_, last, added = file.read_text().splitlines()
    kept = file.stat().st_size - len(head) - 1 - len("next\n")
    assert head == f"[{num_bytes - kept} bytes are left out: this file has at most {1 << 20}]"
    assert first.startswith("line ")
    assert (last, added) == ("line 199999", "next")


def test_a_process_that_prints_without_end_does_not_fill_the_disk(tmp_path: Path) -> None:
    file = tmp_path / "environments.log"
    output = bounded_output(file)
    os.truncate(file, MAX_BYTES + 1)
    os.write(output, b"\nlast\n")
    wait_until(lambda: file.stat().st_size < MAX_BYTES)
    assert file.read_bytes().endswith(b"\nlast\n")
