"""The interface between the runtime of a worker group and a role: its commands, and the checkpoints of one that trains.

The runtime serves each command of a role as the RPC of the same name. A role that trains has checkpoints as well.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from services.runtime.command import Command
from services.runtime.context import RankContext
from splitppo.config import Config
from splitppo.config.section import RoleName
from splitppo.v1 import worker_pb2


class Role(Protocol):
    """The work of a worker group (actor, critic, reward, rollout), as methods that each rank's main thread calls."""

    role: worker_pb2.Role
    num_parameters: int

    def commands(self) -> Sequence[Command]:
        """Returns the RPCs that this role adds to those of the runtime, as `Command`s."""


@runtime_checkable
class CheckpointedRole(Role, Protocol):
    """A role that trains a model; a checkpoint has the model and the ledger of the role's service."""

    model: str  # its architecture in words; a checkpoint of another one is refused

    def save_checkpoint(self, directory: Path, service_state: bytes, *, with_hf_model: bool) -> Future[str]:
        """Writes the role as it is now to `directory` in the background, together with rank 0's `service_state`.

        The future resolves when the files of all ranks are written, on rank 0 with the sha256 of the weights in them
        (as `compute_weights_digest`), or to the OSError of a storage that has failed.
        """

    def check_checkpoint(self, directory: Path) -> None:
        """Raises DamagedCheckpoint if files are missing or torn, ValueError for another model; for rank 0 alone."""

    def load_checkpoint(self, directory: Path | None, progress: Callable[[int, int, str], None]) -> bytes:
        """Loads the checkpoint in `directory` (None: the initial model); returns the saved service state (None: empty).

        `progress` is called while a save that is still being written has to be waited for.

        Raises:
            ValueError, OSError: `directory` has no checkpoint of this role, or a torn one.
        """

    def compute_weights_digest(self) -> str:
        """Returns the sha256 of the weights: sorted named_parameters, little-endian fp32 values; tied weights once."""


@dataclass(frozen=True)
class Program:
    """A role as the launch of its ranks sees it: how it is checked and built, and what its processes need.

    Attributes:
        build: makes the role; every rank calls it once the process groups exist. Its ValueError or OSError is bad
            input.
        check_config: raises ConfigError if a group of this role cannot run with a configuration; every rank calls it
            before it joins the group.
        check_models: proves the models of the group, on request (--check), and yields a line for each. Its ValueError
            or OSError is bad input.
        memory_grows: whether blocks of GPU memory may grow in the ranks, see `use_expandable_segments`.
        adapt: changes each command of the group, those of checkpoints included, for this rank.
    """

    role_name: RoleName
    build: Callable[[RankContext], Role]
    check_config: Callable[[Config], None] = lambda _: None
    check_models: Callable[[RoleName, Config], Iterator[str]] = lambda *_: iter(())
    memory_grows: Callable[[Config], bool] = lambda _: True
    adapt: Callable[[Command, RankContext], Command] = lambda command, _: command
