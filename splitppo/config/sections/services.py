"""The configuration section `services`: where the worker groups run, and the limits of calls to them."""

from typing import Annotated, Literal

from pydantic import Field

from splitppo.config.section import NumberOrAuto, OneOrMany, PositiveInt, RoleName, Section
from splitppo.config.subsections.security import SecurityConfig
from splitppo.config_error import ConfigError

_Indices = Annotated[tuple[Annotated[int, Field(ge=0)], ...], OneOrMany]


class ServiceConfig(Section):
    """The settings of one worker group: its number of ranks, machines, GPUs, cores and addresses."""

    num_processes: PositiveInt = 1
    """The number of ranks of the group, on all its machines."""

    nnodes: PositiveInt = 1
    """The number of machines of the group. Each has an equal share of its ranks."""

    master_addr: str = ""
    """The name or address of machine 0 of the group, where its machines meet. It must be set if nnodes is over 1."""

    master_port: int = Field(29500, ge=1, le=65535)
    """The port at master_addr where the machines of the group meet."""

    socket_ifname: str = ""
    """The network interface that the ranks of several machines use for each other. Empty: the interface that has
    master_addr."""

    devices: _Indices = ()
    """The indices of the GPUs of the group, one for each rank of a machine, as in nvidia-smi; with CUDA_VISIBLE_DEVICES
    in the environment, their places in its list, from 0. Empty: the group computes on the CPU."""

    cpus: _Indices = ()
    """The CPU cores of the group. Empty: all cores that the process may use."""

    threads: NumberOrAuto = "auto"
    """The number of compute threads of each process. auto: the permitted cores, divided between the ranks that compute
    on them, and at most 8 for a rank with a GPU. A resumed run keeps its number."""

    address: str = ""
    """The address (host:port) at which the controller calls the group, with services.launch external."""

    bind: str = "127.0.0.1:0"
    """The address (host:port) at which rank 0 of the group listens. Port 0 takes a free port."""

    def _check_keys(self) -> None:
        if self.num_processes % self.nnodes:
            raise ValueError(f"num_processes ({self.num_processes}) must be a multiple of nnodes ({self.nnodes})")
        if self.devices and len(self.devices) != self.num_local_processes:
            where = f" on {self.nnodes} machines" if self.nnodes > 1 else ""
            raise ValueError(f"devices lists {len(self.devices)} GPUs for num_processes {self.num_processes}{where}")

    @property
    def num_local_processes(self) -> int:
        """The number of ranks that the worker group has on each of its machines."""
        return self.num_processes // self.nnodes


class ServicesConfig(Section):
    """The settings of all worker groups, and how the controller starts and calls them."""

    launch: Literal["local", "external"] = "local"
    """The program that starts the groups. local: the controller, on its own machine. external: another one, and the
    controller calls the groups at their address."""

    actor: ServiceConfig = ServiceConfig()
    critic: ServiceConfig = ServiceConfig()
    reward: ServiceConfig = ServiceConfig()
    rollout: ServiceConfig | None = None
    """A worker group that samples the responses, with the keys of services.actor, e.g. num_processes. null: the actor's
    group samples them."""

    allow_shared_devices: bool = False
    """If true, several groups may use the same GPUs. Their memory must be enough for all of them. The groups of actor
    and rollout never share a GPU, because they work at the same time. The groups of critic and rollout may share GPUs
    without this key, because they take turns. With launch external, they take turns only if this key is true and they
    have a device or core with the same number."""

    start_timeout_s: float = Field(900.0, gt=0.0)
    """The number of seconds that the controller waits until a group answers after its start. A vLLM that finds no
    compiled kernels may need minutes on a GPU."""

    progress_timeout_s: float = Field(600.0, gt=0.0)
    """The longest time, in seconds, in which a running command reports no progress. After it the group counts as
    hanging."""

    reconnect_timeout_s: float = Field(5.0, gt=0.0)
    """The number of seconds for which a worker is called again that cannot be reached, or is busy. After it a group
    that cannot be reached counts as lost."""

    max_restarts: int = Field(3, ge=0)
    """The number of times that lost groups are restarted and restored without a new step in between. Then the run
    ends."""

    restart_backoff_s: float = Field(1.0, ge=0.0)
    """The pause before a restart, in seconds. It doubles with each restart without a new step in between, up to 60
    s."""

    max_queued_commands: PositiveInt = 16
    """The largest number of commands that wait at a service."""

    max_batch_bytes: PositiveInt = 4 << 30
    """The largest size of a batch, in bytes, that a service accepts."""

    max_held_bytes: PositiveInt = 16 << 30
    """The largest size, in bytes, of all batches together that a service holds or is receiving."""

    max_send_s: float = Field(300.0, gt=0.0)
    """The number of seconds that a client may take to send one batch."""

    max_calls: PositiveInt = 64
    """The largest number of calls that a service answers at the same time, without health checks."""

    security: SecurityConfig = SecurityConfig()

    def _check_keys(self) -> None:
        if self.max_held_bytes < self.max_batch_bytes:
            raise ValueError(
                f"max_held_bytes ({self.max_held_bytes}) must be at least max_batch_bytes ({self.max_batch_bytes})"
            )

    def of(self, role: RoleName) -> ServiceConfig:
        """Returns the settings of the worker group of a role (number of ranks, GPUs, cores, addresses).

        Raises:
            ConfigError: it is the role of the rollout group, and the run has none.
        """
        service: ServiceConfig | None = getattr(self, role)
        if service is None:
            raise ConfigError(f"this run has no {role} group: services.{role} is null, expected its keys")
        return service
