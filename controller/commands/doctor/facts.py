"""Facts about a run and its worker groups, as plain values; the names of the attributes are the keys of `--json`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from splitppo.config.section import RoleName
from splitppo.v1 import worker_pb2

# The reason why a group does not answer, or stops answering.
FailureCode = Literal["address", "down", "failed", "not_a_worker", "not_announced", "silent", "storage", "tls", "token"]
RunCode = Literal["certificate", "credentials", "disk", "other_machine", "run_folder", "unfinished"]
GroupCode = Literal["clock", "config", "restarted", "role", "silent_rank", "state", "stopped", "version"]
Code = FailureCode | RunCode | GroupCode


@dataclass(frozen=True)
class RankFacts:
    """The content of the last heartbeat of one rank, `silent_s` seconds ago; an attribute is None if not known."""

    rank: int
    host: str
    pid: int
    device: str | None
    free_bytes: int | None
    total_bytes: int | None
    silent_s: float


@dataclass
class GroupFacts:
    """The facts about one worker group. An attribute is None if the group was not asked for it, or did not answer.

    Attributes:
        address: host:port; empty if the group has not announced it.
        expected_config_digest: the digest that the group reports if it has the doctor's configuration.
        is_reached: True if the group answered.
        failure, failure_code: why the group did not answer, or stopped answering: the end of a sentence, and the code.
        role: the role that the group reports.
        config_differences: keys that differ, with both values, if the run folder has the group's configuration.
        clock_offset_s: the group's clock minus this machine's, exact to half of the fastest round trip.
        stopped_pids: pids, by rank, of its processes on this machine that a signal or a debugger has stopped.
    """

    address: str
    expected_config_digest: str
    is_reached: bool = False
    failure: str | None = None
    failure_code: FailureCode | None = None
    role: str | None = None
    state: str | None = None
    running_method: str | None = None
    progress: dict[str, Any] | None = None
    queued_commands: int | None = None
    num_slots: int | None = None
    step: int | None = None
    epoch: int | None = None
    instance_id: str | None = None
    protocol_version: int | None = None
    software_version: str | None = None
    config_digest: str | None = None
    config_differences: list[str] = field(default_factory=list)
    num_round_trips: int = 0
    round_trip_min_s: float | None = None
    round_trip_p50_s: float | None = None
    round_trip_p99_s: float | None = None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    clock_offset_s: float | None = None
    is_diagnosed: bool = False
    ranks: list[RankFacts] = field(default_factory=list)
    stopped_pids: dict[int, int] = field(default_factory=dict)
    run_dir: str | None = None
    shares_run_dir: bool | None = None
    is_run_dir_writable: bool | None = None
    disk_free_bytes: int | None = None
    certificate_ends_unix_s: int | None = None

    def note_status(self, status: worker_pb2.GetStatusResponse) -> None:
        """Updates this object with a worker's answer to the RPC GetStatus."""
        self.is_reached = True
        self.role = _name(worker_pb2.Role, status.role, "ROLE_")
        self.state = _name(worker_pb2.WorkerState, status.state, "WORKER_STATE_")
        self.running_method = status.running_method or None
        if status.running_method and status.HasField("progress"):
            progress = status.progress
            self.progress = {"done": progress.done, "total": progress.total, "phase": progress.phase}
        self.queued_commands = status.queued_commands
        self.num_slots = len(status.slots)
        self.step = status.committed_step
        self.epoch = status.epoch
        self.instance_id = status.instance_id
        self.protocol_version = status.protocol_version
        self.software_version = status.software_version
        self.config_digest = status.config_digest

    def note_round_trips(self, round_trips_s: Sequence[float], clock_offset_s: float | None) -> None:
        """Computes minimum, median and 99th percentile of round trips (one or more, in seconds), and stores them."""
        self.num_round_trips = len(round_trips_s)
        self.round_trip_min_s = min(round_trips_s)
        p50_s, p99_s = np.quantile(round_trips_s, (0.5, 0.99), method="inverted_cdf")
        self.round_trip_p50_s = float(p50_s)
        self.round_trip_p99_s = float(p99_s)
        self.clock_offset_s = clock_offset_s

    def note_diagnosis(self, diagnosis: worker_pb2.DiagnoseResponse, *, asked_for_nonce: bool) -> None:
        """Copies the answer of a worker to Diagnose into these facts: ranks, run folder, disk and certificate."""
        self.is_diagnosed = True
        self.ranks = [_rank(rank) for rank in diagnosis.ranks]
        self.run_dir = diagnosis.run_dir
        self.is_run_dir_writable = diagnosis.is_writable
        self.shares_run_dir = diagnosis.sees_nonce if asked_for_nonce else None
        self.disk_free_bytes = diagnosis.disk_free_bytes if diagnosis.is_writable else None
        self.certificate_ends_unix_s = diagnosis.certificate_ends_unix_s or None


@dataclass
class RunFacts:
    """The facts of a run in its folder and configuration, for the doctor command; an attribute is None if not known.

    Attributes:
        is_live: True if there are groups to ask.
        controller_runs: True if a controller has the lock of the run folder.
        is_starting: True if this controller has not reached all its groups yet (services.launch: local).
        step: the last recorded step.
        is_completed: True if the run's summary says that it did its last step.
        next_checkpoint_bytes: the size of the last checkpoint; without one, an estimate from the models.
        weights_dir: the folder of the weights for a rollout group; None without such a group.
        weights_needed_bytes: an estimate of the bytes that two versions of the weights need beside what lies there.
        certificate_ends_unix_s: the end of the controller's certificate, or of its authority if that is earlier.
    """

    dir: str
    launch: str
    is_live: bool = False
    controller_runs: bool = False
    is_starting: bool = False
    epoch: int | None = None
    step: int | None = None
    is_completed: bool = False
    last_checkpoint_step: int | None = None
    disk_free_bytes: int | None = None
    disk_total_bytes: int | None = None
    next_checkpoint_bytes: int | None = None
    weights_dir: str | None = None
    weights_free_bytes: int | None = None
    weights_needed_bytes: int | None = None
    tls: bool = False
    token: bool = False
    certificate_ends_unix_s: int | None = None

    def is_awaited(self, group: GroupFacts) -> bool:
        """Returns True if a worker group does not answer because the run is still starting."""
        return self.is_starting and not group.is_reached


@dataclass(frozen=True)
class Finding:
    """A fault of a run: its code for programs, its subject (a role, or "run"), a sentence, and advice."""

    code: Code
    about: str
    sentence: str
    advice: str


@dataclass
class Facts:
    """All facts about a run: of the run itself and of each worker group.

    `mistakes` are faults met while facts were collected, `notes` are no faults.
    """

    run: RunFacts
    now_unix_s: float
    groups: dict[RoleName, GroupFacts] = field(default_factory=dict)
    mistakes: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def _name(enum: Any, number: int, prefix: str) -> str:
    """Returns the name of a protobuf enum value in small letters; the number if this version lacks the value."""
    return enum.Name(number).removeprefix(prefix).lower() if number in enum.values() else str(number)


def _rank(rank: worker_pb2.RankDiagnosis) -> RankFacts:
    return RankFacts(
        rank=rank.process.rank,
        host=rank.process.host,
        pid=rank.process.pid,
        device=rank.device or None,
        free_bytes=rank.free_bytes if rank.total_bytes else None,
        total_bytes=rank.total_bytes or None,
        silent_s=rank.silent_s,
    )
