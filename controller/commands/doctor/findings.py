"""Derives the faults of a run from the facts about it: a sentence and advice for each fault."""

import datetime as dt
from collections.abc import Iterator, Mapping

from controller.commands.doctor.facts import Connection, Diagnosis, Facts, Finding, GroupFacts, RunFacts, Status
from controller.tracking.plain_text import size
from splitppo.config.section import RoleName
from splitppo.our_commands import our_command
from splitppo.rpc.software_version import why_versions_differ
from splitppo.v1 import worker_pb2

MAX_CLOCK_OFFSET_S = 1.0
# A rank sends a heartbeat every second.
MAX_SILENCE_S = 10.0
# The same limit as for the warning at the start of a process (splitppo/rpc/certificates.py).
MIN_CERTIFICATE_DAYS = 14.0
_DAY_S = 86400.0

_STATES = {
    "draining": ("is draining: it takes no more commands and ends", "wait for its end, or start it again"),
    "dirty": (
        "is dirty: a command that changes its weights failed half-way",
        "a controller restores its weights: start the run again, or wait if it is about to",
    ),
    "failed": ("has failed and ends", "its log says why; start it again"),
}
_CERTIFICATES = f"{our_command('tools.certs')} makes new ones (docs/security.md); copy them and restart it"


def find(facts: Facts) -> list[Finding]:
    """Derives all faults from the facts about a run and its worker groups; faults of the run come first."""
    faults = [*facts.mistakes, *_of_run(facts.run, facts.now_unix_s)]
    for role, group in facts.groups.items():
        faults += _of_group(role, group, facts)
    faults += _decoders(facts.groups)
    return faults if facts.run.is_starting else [*faults, *_restarted(facts.groups)]


def _of_run(run: RunFacts, now_unix_s: float) -> Iterator[Finding]:
    """Yields the faults of the run itself: too little room on a disk, a run that ended early, an old certificate."""
    room = "lower checkpoint.keep and remove old checkpoints, or move run.dir to a larger disk"
    elsewhere = "or give a folder with more room in rollout.sync_dir"
    takes = "the next checkpoint takes about {}"
    need = "two versions of the weights need {} more there"
    for folder, free, needed, what, advice in (
        (run.dir, run.disk_free_bytes, run.next_checkpoint_bytes, takes, room),
        (run.weights_dir, run.weights_free_bytes, run.weights_needed_bytes, need, elsewhere),
    ):
        if free is not None and needed is not None and free < needed:
            sentence = f"the disk of {folder} has {size(free)} free, and {what.format(size(needed))}"
            yield Finding("disk", "run", sentence, f"make room there, {advice}")
    if run.step is not None and not run.is_completed and not run.controller_runs:
        saved = run.last_checkpoint_step
        where = f"goes on from the checkpoint of step {saved}" if saved else "starts again: there is no checkpoint"
        sentence = f"the run is not finished: step {run.step} is its last one so far, and no controller runs"
        advice = f"the command that started it {where}; {run.dir}/logs/controller_0.log may say why it ended"
        yield Finding("unfinished", "run", sentence, advice)
    yield from _certificate("run", "the controller's certificate", run.certificate_ends_unix_s, now_unix_s)


def _of_group(role: str, group: GroupFacts, facts: Facts) -> Iterator[Finding]:
    """Yields the faults of one worker group; none if the run is still starting and the group is awaited.

    Stopped processes explain that a group is silent, so a group with such is not reported as silent, too.
    """
    the = f"the {role} at {group.address}" if group.address else f"the {role}"
    if facts.run.is_awaited(group):
        return
    yield from _stopped_ranks(role, group)
    is_explained = group.failure_code == "silent" and group.stopped_pids
    if group.failure is not None and group.failure_code not in (None, "storage") and not is_explained:
        lost = "cannot be asked" if group.status is None else "stopped answering"
        advice = _advice(role, group.failure_code, facts.run)
        yield Finding(group.failure_code, role, f"{the} {lost}: {group.failure}", advice)
    if group.status is not None:
        yield from _of_status(role, the, group, group.status, facts.run)
    if group.connection is not None:
        yield from _clock(role, the, group.connection)
    if group.failure_code == "storage":
        sentence = f"the run folder does not answer {the}: {group.failure}"
        yield Finding("run_folder", role, sentence, "look at the network file system of its machine")
    if group.diagnosis is not None:
        yield from _run_folder(role, the, group.diagnosis, facts.run)
        yield from _silent_ranks(role, group, group.diagnosis)
        ends_unix_s = group.diagnosis.certificate_ends_unix_s
        yield from _certificate(role, f"the certificate of {the}", ends_unix_s, facts.now_unix_s)


def _of_status(role: str, the: str, group: GroupFacts, status: Status, run: RunFacts) -> Iterator[Finding]:
    """Yields the faults in what a group says of itself: a wrong role, version or configuration, or a state that ends.

    Another version or role explains another configuration, which is not reported then. `the` names the group.
    """
    if status.role != role:
        advice = f"correct services.{role}.address: two groups may have been mixed up"
        yield Finding("role", role, f"{the} is a {status.role}, expected the {role}", advice)
    greeting = worker_pb2.HandshakeResponse(
        protocol_version=status.protocol_version, software_version=status.software_version
    )
    if because := why_versions_differ("this doctor", the, greeting):
        sentence, _, advice = because.rpartition(": ")
        yield Finding("version", role, sentence, advice)
    elif status.role == role and status.config_digest != group.expected_config_digest:
        different = _differences(role, group, status)
        advice = f"restart it with this configuration, or give the one that it runs with ({run.dir}/config.yaml)"
        yield Finding("config", role, f"{the} was started with another configuration: {different}", advice)
    if status.state in _STATES:
        what, advice = _STATES[status.state]
        yield Finding("state", role, f"{the} {what}", advice)


def _differences(role: str, group: GroupFacts, status: Status) -> str:
    """Says how the configuration of a group differs: the keys that differ or, if it has not told them, the digests."""
    if group.config_differences:
        return "; ".join(group.config_differences)
    digests = f"its digest begins with {status.config_digest[:12]}, by this one {group.expected_config_digest[:12]}"
    return f"{digests}, so the sections that shape the {role} differ"


def _advice(role: str, code: str, run: RunFacts) -> str:
    """Returns advice for a worker group that does not answer, by the code of the failure."""
    log = f"{run.dir}/logs/{role}_0.log"
    again = "the controller starts it again, or ends and says why" if run.launch == "local" else "start it again"
    return {
        "down": f"{log} says why it ended, if it ran; {again}; see whether services.{role}.address is right",
        "not_announced": f"it is being started again, or has ended: {log} says more",
        "address": f"correct the host in services.{role}.address, or its entry in the name service",
        "tls": "the same services.security and ca.pem on both sides; the certificate must name the host of"
        f" services.{role}.address (docs/security.md)",
        "token": "the first token of this side must be in the other side's file; restart the group if that has changed",
        "not_a_worker": f"correct services.{role}.address: another program has this port",
        "silent": f"see whether services.{role}.address is right, the machine is up and its firewall lets this one in;"
        f" a process that hangs is in {log}",
    }.get(code, f"{log} says more")


def _clock(role: str, the: str, connection: Connection) -> Iterator[Finding]:
    """Yields a fault if a group's clock is certainly off by more than MAX_CLOCK_OFFSET_S.

    The offset was measured by a call and its answer, and is known to half of their round trip.
    """
    offset_s = connection.clock_offset_s
    uncertainty_s = connection.round_trip_min_s / 2
    if offset_s is not None and abs(offset_s) - uncertainty_s > MAX_CLOCK_OFFSET_S:
        off = f"{abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} this machine's"
        so = "certificates may count as expired or not valid yet, and logs of two machines do not fit together"
        advice = "set both clocks (NTP), then restart the run"
        yield Finding("clock", role, f"the clock of {the} is {off}: {so}", advice)


def _run_folder(role: str, the: str, diagnosis: Diagnosis, run: RunFacts) -> Iterator[Finding]:
    """Yields a fault if a group has another run folder, or cannot write into it; that it is shared may be unknown."""
    if diagnosis.shares_run_dir is False:
        sentence = f"{the} has another run folder: a file made in {run.dir} is not in its {diagnosis.run_dir}"
        mount = "mount the same storage there and here, and give it in run.dir on both sides"
        yield Finding("run_folder", role, sentence, mount)
    elif not diagnosis.is_run_dir_writable:
        sentence = f"{the} cannot write into its run folder {diagnosis.run_dir}"
        yield Finding("run_folder", role, sentence, "its user needs the right to write there, on storage that has it")


def _stopped_ranks(role: str, group: GroupFacts) -> Iterator[Finding]:
    """Yields a fault for each process of a group that a signal or a debugger has stopped; only this machine is seen."""
    for rank, pid in group.stopped_pids.items():
        where = f"pid {pid} on this machine"
        sentence = f"rank {rank} of the {role} ({where}) is stopped (state T), by a signal or a debugger"
        advice = f"kill -CONT {pid} lets it go on; kill -KILL {pid} ends its group, which is then started again"
        yield Finding("stopped", role, sentence, advice)


def _silent_ranks(role: str, group: GroupFacts, diagnosis: Diagnosis) -> Iterator[Finding]:
    """Yields a fault for each rank without a sign of life for MAX_SILENCE_S, unless it is known to be stopped."""
    for rank in diagnosis.ranks:
        if rank.silent_s > MAX_SILENCE_S and rank.rank not in group.stopped_pids:
            where = f"pid {rank.pid} on {rank.host}"
            sentence = f"rank {rank.rank} of the {role} ({where}) has given no sign of life for {rank.silent_s:.0f} s"
            until = "its group ends by itself after services.progress_timeout_s"
            yield Finding("silent_rank", role, sentence, f"look at {where}: stopped, or its machine away; {until}")


def _certificate(about: str, what: str, ends_unix_s: int | None, now_unix_s: float) -> Iterator[Finding]:
    """Yields a fault if a certificate has expired or soon will; `ends_unix_s` None: none is known."""
    if ends_unix_s is None or (days := (ends_unix_s - now_unix_s) / _DAY_S) >= MIN_CERTIFICATE_DAYS:
        return
    ends = f"{dt.datetime.fromtimestamp(ends_unix_s, dt.UTC):%Y-%m-%d %H:%M} UTC"
    if days < 0:
        sentence = f"{what} has expired: it was valid until {ends}, and no new connection will be accepted"
    else:
        sentence = f"{what} ends in {days:.1f} days, at {ends}; connections after that are refused"
    yield Finding("certificate", about, sentence, _CERTIFICATES)


def _restarted(groups: Mapping[RoleName, GroupFacts]) -> Iterator[Finding]:
    """Yields a fault for each worker group that knows no controller while another group does.

    Such a group was restarted. Different steps of the groups are no fault.
    """
    epochs = {role: group.status.epoch for role, group in groups.items() if group.status is not None}
    newest = max(epochs.values(), default=0)
    for role, epoch in epochs.items():
        if newest and not epoch:
            knows = f"was restarted and knows no controller; others work for epoch {newest}"
            advice = "a controller that runs restores its weights at its next call; else start the run again"
            yield Finding("restarted", role, f"the {role} at {groups[role].address} {knows}", advice)


def _decoders(groups: Mapping[RoleName, GroupFacts]) -> Iterator[Finding]:
    """Yields a fault for each worker group that decodes images otherwise than the first group that decodes any."""
    known = {role: group.diagnosis.image_decoder for role, group in groups.items() if group.diagnosis is not None}
    decoders = {role: decoder for role, decoder in known.items() if decoder is not None}
    for role, decoder in decoders.items():
        first, of_first = next(iter(decoders.items()))
        if decoder != of_first:
            sentence = f"the {role} decodes images by {decoder}, the {first} by {of_first}: they see other pixels"
            yield Finding("images", role, sentence, "install the same build of Pillow for both (requirements/)")
