"""Prints what the doctor command found out about a run and its faults: tables for people, or JSON for programs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from controller.commands.doctor.facts import Facts, Finding, GroupFacts
from controller.tracking.plain_text import columns, size, span

# Raised when a key of the JSON is removed or changes its meaning; new keys may be added at any time.
FORMAT = 1
_DAY_S = 86400.0
_DIGEST_CHARACTERS = 12


def as_json(facts: Facts, findings: Sequence[Finding]) -> str:
    """Converts all facts and faults of a run into JSON text, by the names of their attributes."""
    content = {"format": FORMAT, "healthy": not findings, "findings": [asdict(finding) for finding in findings]}
    content |= {name: part for name, part in asdict(facts).items() if name != "mistakes"}  # they are among the findings
    return json.dumps(content, indent=1) + "\n"


def as_text(facts: Facts, findings: Sequence[Finding]) -> str:
    """Formats the facts about run, worker groups (a column each) and ranks as tables, and lists the faults below."""
    tables: list[list[tuple[str, ...]]] = [[*_of_run(facts)], [*_groups(facts)], [*_ranks(facts)]]
    blocks = [columns(table, gap=3) for table in tables if table]
    blocks.append([*facts.notes, *_verdict(findings)])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _verdict(findings: Sequence[Finding]) -> Iterator[str]:
    if not findings:
        yield "healthy"
        return
    yield f"{len(findings)} {'fault' if len(findings) == 1 else 'faults'}:"
    for finding in findings:
        yield f"* {finding.sentence}"
        yield f"  -> {finding.advice}"


def _of_run(facts: Facts) -> Iterator[tuple[str, str]]:
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
    rates = (group.upload_bytes_per_s, group.download_bytes_per_s)
    clock_s = group.clock_offset_s
    cells = {
        "": role,
        "address": group.address or "-",
        "version": group.software_version or "-",
        "state": _state(group),
        "step, epoch": f"{'no weights' if group.step == -1 else group.step}, {group.epoch}",
        "instance": (group.instance_id or "-")[:_DIGEST_CHARACTERS],
        "configuration": _configuration(group),
        "run folder": _run_folder(group),
        "round trip": _round_trip(group),
        "to it, from it": ", ".join("-" if rate is None else f"{size(rate)}/s" for rate in rates),
        "clock": "-" if clock_s is None else f"{'+' if clock_s >= 0 else ''}{span(clock_s)}",
        "certificate": "-" if group.certificate_ends_unix_s is None else _days(group.certificate_ends_unix_s, facts),
    }
    if not group.is_reached:
        cells |= {**dict.fromkeys([*cells][2:], "-"), "state": "not reached"}
    return cells


def _state(group: GroupFacts) -> str:
    waiting = f", {group.queued_commands} waiting" if group.queued_commands else ""
    if group.running_method is None:
        return f"{group.state}{waiting}"
    progress = group.progress
    how_far = f", {progress['done']} of {progress['total']}" if progress and progress["total"] else ""
    # A phase of several words says what a command waits for, e.g. "waiting for 3 replies".
    what = f", {progress['phase']}" if progress and " " in progress["phase"] else ""
    return f"{group.state}: {group.running_method}{how_far}{what}{waiting}"


def _configuration(group: GroupFacts) -> str:
    same = group.config_digest == group.expected_config_digest
    return f"{(group.config_digest or '-')[:_DIGEST_CHARACTERS]}{'' if same else ', not this one'}"


def _run_folder(group: GroupFacts) -> str:
    if group.shares_run_dir is None:
        return "-"
    free = "" if group.disk_free_bytes is None else f", {size(group.disk_free_bytes)} free"
    return f"{'shared' if group.shares_run_dir else 'another one'}{free}"


def _round_trip(group: GroupFacts) -> str:
    if group.round_trip_p50_s is None or group.round_trip_p99_s is None:
        return "-"
    return f"{span(group.round_trip_p50_s)}, p99 {span(group.round_trip_p99_s)}"


def _days(ends_unix_s: int, facts: Facts) -> str:
    return f"{(ends_unix_s - facts.now_unix_s) / _DAY_S:.0f} days left"


def _ranks(facts: Facts) -> Iterator[tuple[str, ...]]:
    for role, group in facts.groups.items():
        for rank in group.ranks:
            name = f"{role} {rank.rank} of {len(group.ranks)}"
            free = _free(rank.free_bytes, rank.total_bytes)
            yield name, rank.host, f"pid {rank.pid}", rank.device or "-", free


def _free(free_bytes: int | None, total_bytes: int | None) -> str:
    return "-" if free_bytes is None or total_bytes is None else f"{size(free_bytes)} of {size(total_bytes)} free"
