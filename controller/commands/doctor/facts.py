"""Facts about a run and its worker groups, as plain values; the names of the attributes are the keys of `--json`."""

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from splitppo.config.section import RoleName
from splitppo.v1 import worker_pb2

# The reason why a group does not answer, or stops answering.
FailureCode = Literal["address", "down", "failed", "not_a_worker", "not_announced", "silent", "storage", "tls", "token"]
RunCode = Literal["certificate", "credentials", "disk", "other_machine", "run_folder", "unfinished"]
GroupCode = Literal["clock", "config", "images", "restarted", "role", "silent_rank", "state", "stopped", "version"]
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


@dataclass(frozen=True)
class Status:
    """The answer of a worker to GetStatus: its own role, and what it does, which is None if it is idle."""

    role: str
    state: str
    running_method: str | None
    progress: dict[str, Any] | None
    queued_commands: int
    num_slots: int
    step: int
    epoch: int
    instance_id: str
    protocol_version: int
    software_version: str
    config_digest: str

    @classmethod
    def of(cls, answer: worker_pb2.GetStatusResponse) -> "Status":
        """Converts the answer of a worker."""
        progress = None
        if answer.running_method and answer.HasField("progress"):
            done = answer.progress
            progress = {"done": done.done, "total": done.total, "phase": done.phase}
        return cls(
            role=_name(worker_pb2.Role, answer.role, "ROLE_"),
            state=_name(worker_pb2.WorkerState, answer.state, "WORKER_STATE_"),
            running_method=answer.running_method or None,
            progress=progress,
            queued_commands=answer.queued_commands,
            num_slots=len(answer.slots),
            step=answer.committed_step,
            epoch=answer.epoch,
            instance_id=answer.instance_id,
            protocol_version=answer.protocol_version,
            software_version=answer.software_version,
            config_digest=answer.config_digest,
        )


@dataclass(frozen=True)
class Connection:
    """The connection to a worker, as measured: round trips, bytes per second each way, and the clocks of both ends.

    An attribute is None if it was not measured. `clock_offset_s` is the group's clock minus this machine's, exact to
    half of the fastest round trip.
    """

    num_round_trips: int
    round_trip_min_s: float
    round_trip_p50_s: float
    round_trip_p99_s: float
    clock_offset_s: float | None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None

    @classmethod
    def of(cls, round_trips_s: Sequence[float], clock_offset_s: float | None) -> "Connection":
        """Computes minimum, median and 99th percentile of round trips: one or more, in seconds."""
        p50_s, p99_s = np.quantile(round_trips_s, (0.5, 0.99), method="inverted_cdf")
        return cls(len(round_trips_s), min(round_trips_s), float(p50_s), float(p99_s), clock_offset_s)


@dataclass(frozen=True)
class Diagnosis:
    """The answer of a worker to Diagnose: its ranks, storage and certificate; None is what it does not know.

    `image_decoder` is equal in groups that decode images alike; None in a group that reads text alone.
    """

    ranks: tuple[RankFacts, ...]
    run_dir: str
    shares_run_dir: bool | None
    is_run_dir_writable: bool
    disk_free_bytes: int | None
    certificate_ends_unix_s: int | None
    image_decoder: str | None = None

    @classmethod
    def of(cls, answer: worker_pb2.DiagnoseResponse, *, asked_for_nonce: bool) -> "Diagnosis":
        """Converts the answer of a worker. Whether it shares the run folder is known if it was asked for a nonce."""
        return cls(
            ranks=tuple(_rank(rank) for rank in answer.ranks),
            run_dir=answer.run_dir,
            shares_run_dir=answer.sees_nonce if asked_for_nonce else None,
            is_run_dir_writable=answer.is_writable,
            disk_free_bytes=answer.disk_free_bytes if answer.is_writable else None,
            certificate_ends_unix_s=answer.certificate_ends_unix_s or None,
            image_decoder=answer.image_decoder or None,
        )


@dataclass
class GroupFacts:
    """The facts about one worker group: how it is reached, and the three parts that it was asked for.

    Attributes:
        address: host:port; empty if the group has not announced it.
        expected_config_digest: the digest that the group reports if it has the doctor's configuration.
        failure, failure_code: why the group did not answer, or stopped answering: the end of a sentence, and the code.
        config_differences: keys that differ, with both values, if the run folder has the group's configuration.
        stopped_pids: pids, by rank, of its processes on this machine that a signal or a debugger has stopped.
        status, connection, diagnosis: None if the group was not asked for it, or did not answer.
    """

    address: str
    expected_config_digest: str
    failure: str | None = None
    failure_code: FailureCode | None = None
    config_differences: list[str] = field(default_factory=list)
    stopped_pids: dict[int, int] = field(default_factory=dict)
    status: Status | None = None
    connection: Connection | None = None
    diagnosis: Diagnosis | None = None

    def flat(self) -> dict[str, Any]:
        """Returns all facts by name, those of the three parts beside the others; null or empty if not known."""
        own = {name: value for name, value in vars(self).items() if name not in _PARTS}
        unknown = {part.name: None for of in _PARTS.values() for part in fields(of)}
        known = [asdict(getattr(self, name)) for name in _PARTS if getattr(self, name) is not None]
        reached = {"is_reached": self.status is not None, "is_diagnosed": self.diagnosis is not None}
        return own | reached | unknown | {"num_round_trips": 0, "ranks": []} | dict(ChainMap(*known))


_PARTS = {"status": Status, "connection": Connection, "diagnosis": Diagnosis}


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
        return self.is_starting and group.status is None


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
    """Reads what a rank told about itself; what was not measured, told as 0 or "", becomes None."""
    return RankFacts(
        rank=rank.process.rank,
        host=rank.process.host,
        pid=rank.process.pid,
        device=rank.device or None,
        free_bytes=rank.free_bytes if rank.total_bytes else None,
        total_bytes=rank.total_bytes or None,
        silent_s=rank.silent_s,
    )
