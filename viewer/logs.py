"""Reads the logs of a group as they were at a moment of the run: of the lost rank, of rank 0, and of the controller."""

import os
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, BinaryIO

from splitppo.run_folder.files import RunDir, Unreadable
from splitppo.run_folder.logs import CONTROLLER_LOG, LOGS, log_before, log_of_rank, log_of_torchrun
from viewer.redaction import redacted

MAX_LINES = 60
MAX_CHARS = 2_000
_MAX_LOG_BYTES = 1 << 40  # a log may be large, for only some blocks of it are read
_BLOCK = 1 << 16
_MAX_SEARCHED = 1 << 28
_STAMP_BYTES = 26
_STAMP = re.compile(rb"\n(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) ")
_ROLE = re.compile(r"[a-z]{1,20}")


def log_at(folder: RunDir, events: Sequence[Mapping[str, Any]], number: int) -> list[dict[str, Any]]:
    """Returns [{"file", "sentence", "lines"}]: logs of the group that an event says is lost, and of the controller.

    The lines are those up to the event, by their time stamps, which are in local time: if the viewer's machine has
    another one, they are not those. A sentence says what the lines are, or why there are none.

    Raises:
        Unreadable: there is no such event, or it does not say which group was lost and when.
    """
    if number >= len(events):
        raise Unreadable(f"events.jsonl has {len(events)} events; there is none with number {number}, from 0.")
    event = events[number]
    role, rank = (event.get("role"), event.get("rank")) if event.get("kind") == "group_lost" else ("controller", 0)
    if not isinstance(role, str) or not _ROLE.fullmatch(role):
        raise Unreadable(f"Event {number} names no role.")
    try:
        moment = datetime.fromtimestamp(event["unix_s"], UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
    except (KeyError, TypeError, ValueError, OverflowError, OSError) as error:
        raise Unreadable(f"Event {number} has no time: unix_s is {str(event.get('unix_s'))[:100]}.") from error
    if role == "controller":
        return [_read(folder, [CONTROLLER_LOG], moment)]
    ranks = dict.fromkeys([rank, 0] if isinstance(rank, int) and 0 <= rank < 1_000_000 else [0])
    logs = [log_of_rank(role, one) for one in ranks]
    files = [[log, log_before(log)] for log in logs]
    if not any(one.get("kind") == "group_up" and one.get("role") == role for one in events[number + 1 :]):
        files.append([log_of_torchrun(role)])  # of the last start alone
    return [_read(folder, names, moment) for names in (*files, [CONTROLLER_LOG])]


def _read(folder: RunDir, files: Sequence[str], moment: str) -> dict[str, Any]:
    """Reads the first of some files that begins before a moment."""
    sentence = ""
    for file in files:
        try:
            with folder.open(LOGS, file, max_bytes=_MAX_LOG_BYTES) as stream:
                lines, has_stamps = _until(stream, moment.encode())
        except Unreadable as error:
            sentence = sentence or str(error)
            continue
        if lines or not has_stamps:
            told = f"up to {moment} in local time" if has_stamps else "its last lines, for they have no time stamps"
            return {"file": f"logs/{file}", "sentence": told if lines else "It is empty.", "lines": lines}
        read = f"at most the last {_MAX_SEARCHED >> 20} MiB are read"
        sentence = f"All lines are younger than {moment} ({read}): of logs before a group's last start, one is kept."
    return {"file": f"logs/{files[0]}", "sentence": sentence, "lines": []}


def _until(file: BinaryIO, moment: bytes) -> tuple[list[str], bool]:
    """Returns the last lines up to a moment, and whether lines have time stamps; without, the last lines of all.

    Blocks are read from the end backwards, and the stamps in each likewise, until one is not younger than the moment:
    the lines go from there to `end`, where the next stamp begins.
    """
    size = os.fstat(file.fileno()).st_size
    has_stamps = False
    end = size  # where the oldest of the younger lines begins, as far as they have been seen
    for begin in range(size // _BLOCK * _BLOCK, max(-1, size - _MAX_SEARCHED), -_BLOCK):
        first = file.seek(max(0, begin - 1))
        content = b"\n" * (begin == 0) + file.read(_BLOCK + _STAMP_BYTES)
        for stamp in reversed([*_STAMP.finditer(content)]):
            if stamp[1] <= moment:
                return _lines(file, max(0, end - _BLOCK), end), True
            end = first + stamp.start() + (begin > 0)
            has_stamps = True
    return ([], True) if has_stamps else (_lines(file, max(0, size - _BLOCK), size), False)


def _lines(file: BinaryIO, begin: int, end: int) -> list[str]:
    """Returns the last lines between two places of a file; a first line that may be cut is left out."""
    file.seek(begin)
    lines = file.read(end - begin).split(b"\n")[begin > 0 :]
    shown = [line.decode(errors="replace")[:MAX_CHARS] for line in lines if line.strip()][-MAX_LINES:]
    return [redacted(line) for line in shown]
