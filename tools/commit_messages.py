"""Checks the messages of this branch's commits: `python -m tools.commit_messages`; ends with 1 and a line for each
fault.

A message names no path of a machine (a merge's default message does). A commit that changes more than 200 lines has a
body that says why and how it was checked. Commits from before the rule are accepted as they are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SINCE = "2026-11-23T00:00:00Z"
MAX_LINES_WITHOUT_BODY = 200
MACHINE_PATH = re.compile(r"(?<![\w.~/-])/(?:check|home|mnt|root|tmp|Users|var|work)/[\w.-]+")


@dataclass(frozen=True)
class Commit:
    """A commit as `git log` shows it; `num_lines` counts the lines that it adds and removes, and is 0 for a merge."""

    name: str
    subject: str
    body: str
    num_lines: int


def faults(commit: Commit) -> Iterator[str]:
    """Yields a sentence for each fault of a message."""
    if path := MACHINE_PATH.search(f"{commit.subject}\n{commit.body}"):
        yield f"it names a path of a machine, {path.group()}: a merge, too, gets a message of its own (git merge -m)"
    if commit.num_lines > MAX_LINES_WITHOUT_BODY and not commit.body.strip():
        yield f"it changes {commit.num_lines} lines and has no body: say why, and how it was checked"


def commits(since: str = SINCE) -> list[Commit]:
    """Returns the commits of the current branch since a date, the newest first."""
    shown = "%x00%h%x01%s%x01%b%x01"
    command = ["git", "log", f"--since={since}", f"--format={shown}", "--shortstat"]
    log = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    entries = []
    for entry in log.split("\0")[1:]:
        name, subject, body, stat = entry.split("\1")
        entries.append(Commit(name, subject, body, sum(map(int, re.findall(r"(\d+) (?:ins|del)", stat)))))
    return entries


def main() -> int:
    """Prints every fault and returns 1 if there is one."""
    lines = [f"{commit.name} {commit.subject!r}: {fault}" for commit in commits() for fault in faults(commit)]
    sys.stderr.write("".join(f"{line}\n" for line in lines))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
