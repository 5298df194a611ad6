"""Prints what the doctor command found out about a run and its faults: tables for people, or JSON for programs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from controller.commands.doctor.facts import Connection, Diagnosis, Facts, Finding, GroupFacts, Status
from controller.tracking.plain_text import columns, size, span

# Raised when a key of the JSON is removed or changes its meaning; new keys may be added at any time.
FORMAT = 1
_DAY_S = 86400.0
_DIGEST_CHARACTERS = 12
_HEADINGS = (
    "version",
    "state",
    "step, epoch",
    "instance",
    "configuration",
    "run folder",
    "round trip",
    "to it, from it",
    "clock",
    "certificate",
)


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Converts all facts and faults of a run into JSON text, by the names of their attributes."""
    content = {"format": FORMAT, "healthy": not findings, "findings": [asdict(finding) for finding in findings]}
    content |= {"run": asdict(facts.run), "now_unix_s": facts.now_unix_s}
    content |= {"groups": {role: group.flat() for role, group in facts.groups.items()}, "notes": facts.notes}
    return json.dumps(content, indent=1) + "\n"


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Formats the facts about run, worker groups (a column each) and ranks as tables, and lists the faults below."""
    tables: list[list[tuple[str, ...]]] = [[*_of_run(facts)], [*_groups(facts)], [*_ranks(facts)]]
    blocks = [columns(table, gap=3) for table in tables if table]
    blocks.append([*facts.notes, *_verdict(findings)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _verdict(findings: Sequence[Finding]) -> Iterator[str]:
    """Yields the lines that say what is wrong and what helps; "healthy" if nothing is."""
    if not findings:
        yield "healthy"
        return
    yield f"{len(findings)} {'fault' if len(findings) == 1 else 'faults'}:"
    for finding in findings:
        yield f"* {finding.sentence}"
        yield f"  -> {finding.advice}"


def _of_run(facts: Facts) -> Iterator[tuple[str, str]]:
    """Yields (name, text) of each line about the run: folder, controller, disk and wire."""
    run = facts.run
    epoch = "" if run.epoch is None else f", epoch {run.epoch}"
    saved = "no checkpoint" if run.last_checkpoint_step is None else f"checkpoint of step {run.last_checkpoint_step}"
    yield "run folder", run.dir
    yield "controller", f"{'runs' if run.controller_runs else 'does not run'}{epoch}; {saved}"
    needed = run.next_checkpoint_bytes
    next_one = "has an unknown size" if needed is None else f"takes about {size(needed)}"
    yield "disk", f"{_free(run.disk_free_bytes, run.disk_total_bytes)}; the next checkpoint {next_one}"
    wire = "mutual TLS" if run.tls else "plaintext on this machine"
    token = ", a token" if run.token else ", no token" if run.is_live else ""  # the token of a local run goes with it
    ends = run.certificate_ends_unix_s
    left = "" if ends is None else f"; the controller's certificate has {_days(ends, facts)}"
    yield "wire", f"{wire}{token}{left}"


def _groups(facts: Facts) -> Iterator[tuple[str, ...]]:
    if cells := [_cells(role, group, facts) for role, group in facts.groups.items()]:
        yield from zip(cells[0], *(column.values() for column in cells), strict=True)


def _cells(role: str, group: GroupFacts, facts: Facts) -> dict[str, str]:
    """Returns the table column of a worker group: a cell for each heading, a dash for what is not known."""
    headings = {"": role, "address": group.address or "-"}
    status = group.status
    if status is None:
        return headings | dict.fromkeys(_HEADINGS, "-") | {"state": "not reached"}
    known = _of_status(group, status)
    if group.connection is not None:
        known |= _of_connection(group.connection)
    if group.diagnosis is not None:
        known |= _of_diagnosis(group.diagnosis, facts)
    return headings | dict.fromkeys(_HEADINGS, "-") | known


def _of_status(group: GroupFacts, status: Status) -> dict[str, str]:
    """Returns a group's cells, by head of the column, about what it says of itself; "-" for what it does not say."""
    is_same = status.config_digest == group.expected_config_digest
    digest = status.config_digest[:_DIGEST_CHARACTERS] or "-"
    return {
        "version": status.software_version or "-",
        "state": _state(status),
        "step, epoch": f"{'no weights' if status.step == -1 else status.step}, {status.epoch}",
        "instance": status.instance_id[:_DIGEST_CHARACTERS] or "-",
        "configuration": f"{digest}{'' if is_same else ', not this one'}",
    }


def _of_connection(connection: Connection) -> dict[str, str]:
    """Returns a group's cells, by head of the column, about the network to it."""
    rates = (connection.upload_bytes_per_s, connection.download_bytes_per_s)
    clock_s = connection.clock_offset_s
    return {
        "round trip": f"{span(connection.round_trip_p50_s)}, p99 {span(connection.round_trip_p99_s)}",
        "to it, from it": ", ".join("-" if rate is None else f"{size(rate)}/s" for rate in rates),
        "clock": "-" if clock_s is None else f"{'+' if clock_s >= 0 else ''}{span(clock_s)}",
    }


def _of_diagnosis(diagnosis: Diagnosis, facts: Facts) -> dict[str, str]:
    """Returns a group's cells, by head of the column, about its run folder and certificate, as far as known."""
    cells = {}
    if diagnosis.shares_run_dir is not None:
        free = "" if diagnosis.disk_free_bytes is None else f", {size(diagnosis.disk_free_bytes)} free"
        cells["run folder"] = f"{'shared' if diagnosis.shares_run_dir else 'another one'}{free}"
    if diagnosis.certificate_ends_unix_s is not None:
        cells["certificate"] = _days(diagnosis.certificate_ends_unix_s, facts)
    return cells


def _state(status: Status) -> str:
    """Describes what a group does: its state, the command that runs and how far it is, the commands that wait."""
    waiting = f", {status.queued_commands} waiting" if status.queued_commands else ""
    if status.running_method is None:
        return f"{status.state}{waiting}"
    progress = status.progress
    how_far = f", {progress['done']} of {progress['total']}" if progress and progress["total"] else ""
    # A phase of several words says what a command waits for, e.g. "waiting for 3 replies".
    what = f", {progress['phase']}" if progress and " " in progress["phase"] else ""
    return f"{status.state}: {status.running_method}{how_far}{what}{waiting}"


def _days(ends_unix_s: int, facts: Facts) -> str:
    return f"{(ends_unix_s - facts.now_unix_s) / _DAY_S:.0f} days left"


def _ranks(facts: Facts) -> Iterator[tuple[str, ...]]:
    """Yields the cells of each rank of all groups: name, host, process, device, free memory."""
    for role, group in facts.groups.items():
        ranks = group.diagnosis.ranks if group.diagnosis else ()
        for rank in ranks:
            name = f"{role} {rank.rank} of {len(ranks)}"
            free = _free(rank.free_bytes, rank.total_bytes)
            yield name, rank.host, f"pid {rank.pid}", rank.device or "-", free


def _free(free_bytes: int | None, total_bytes: int | None) -> str:
    return "-" if free_bytes is None or total_bytes is None else f"{size(free_bytes)} of {size(total_bytes)} free"
