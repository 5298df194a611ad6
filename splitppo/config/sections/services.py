"""The section `services`."""

from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import NumberOrAuto, OneOrMany, PositiveInt, RoleName, Section
from splitppo.config.subsections.security import SecurityConfig

_Indices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], OneOrMany]


class ServiceConfig(Section):
    """The place of a group: machines, devices, cores, addresses."""

    num_processes: PositiveInt = 1
    """ranks, started by services.launch: local"""

    nnodes: PositiveInt = 1
    """machines of the group, each with an equal share of its ranks"""

    master_addr: str = ""
    """name or address of machine 0, where the machines of a group meet"""

    master_port: int = Field(29500, ge=1, le=65535)
    """port of master_addr, for the same"""

    socket_ifname: str = ""
    """interface that the ranks of several machines speak over; empty: the one that master_addr is on"""

    devices: _Indices = ()
    """GPU indices, one per rank of a machine; empty: CPU"""

    cpus: _Indices = ()
    """CPU cores of the group; empty: all"""

    threads: NumberOrAuto = "auto"
    """compute threads per process; auto: the permitted cores, divided between the ranks that compute on them (at most
    8 beside a GPU); a resumed run keeps its number"""

    address: str = ""
    """host:port the controller connects to (launch: external)"""

    bind: str = "127.0.0.1:0"
    """host:port rank 0 listens on; port 0 takes a free one"""

    def _check_keys(self) -> None:
        if self.num_processes % self.nnodes:
            raise ValueError(f"num_processes ({self.num_processes}) must be a multiple of nnodes ({self.nnodes})")
        if self.devices and len(self.devices) != self.num_local_processes:
            where = f" on {self.nnodes} machines" if self.nnodes > 1 else ""
            raise ValueError(f"devices lists {len(self.devices)} GPUs for num_processes {self.num_processes}{where}")

    @property
    def num_local_processes(self) -> int:
        """The ranks on each machine."""
        return self.num_processes // self.nnodes


class ServicesConfig(Section):
    """The groups and how the controller reaches them."""

    launch: Literal["local", "external"] = "local"
    """local: the controller starts all groups"""

    actor: ServiceConfig = ServiceConfig()
    critic: ServiceConfig = ServiceConfig()
    reward: ServiceConfig = ServiceConfig()
    allow_shared_devices: bool = False
    """groups may use the same GPUs, if memory allows"""

    start_timeout_s: float = Field(300.0, gt=0.0)
    """until a group answers"""

    progress_timeout_s: float = Field(600.0, gt=0.0)
    """longest silence of a running command"""

    reconnect_timeout_s: float = Field(5.0, gt=0.0)
    """how long a worker is called again that cannot be reached (then its group is lost) or is busy"""

    max_restarts: int = Field(3, ge=0)
    """times that lost groups are restarted and restored; every step that is new starts afresh"""

    restart_backoff_s: float = Field(1.0, ge=0.0)
    """pause before a restart; doubles with each one that brings no new step, up to 60 s"""

    max_queued_commands: PositiveInt = 16
    """commands that a service queues at most"""

    max_batch_bytes: PositiveInt = 4 << 30
    """largest batch a service takes"""

    max_held_bytes: PositiveInt = 16 << 30
    """bytes of all batches that a service holds, and of those on their way to it"""

    max_send_s: float = Field(300.0, gt=0.0)
    """seconds that a client may take to send one batch"""

    max_calls: PositiveInt = 64
    """calls that a service answers at a time, health checks aside"""

    security: SecurityConfig = SecurityConfig()

    def _check_keys(self) -> None:
        if self.max_held_bytes < self.max_batch_bytes:
            raise ValueError(
                f"max_held_bytes ({self.max_held_bytes}) must be at least max_batch_bytes ({self.max_batch_bytes})"
            )

    def of(self, role: RoleName) -> ServiceConfig:
        """Returns the place of the group of a role."""
        return {"actor": self.actor, "critic": self.critic, "reward": self.reward}[role]
