"""One rank of the rollout's group; this module's imports are made once for all ranks that are forked."""

from typing import NoReturn

from services.rollout.role import RolloutRole, check_config, check_models
from services.runtime.launch import run_service
from services.runtime.role import Program

# The GPU memory of a rollout rank is that of its engine, which has rules of its own.
PROGRAM = Program("rollout", RolloutRole, check_config, check_models, memory_grows=lambda _: False)


def run_rank() -> NoReturn:
    """Runs one rank of the rollout's group with the arguments of this process, and ends the process."""
    run_service(PROGRAM)
