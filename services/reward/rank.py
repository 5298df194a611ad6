"""One rank of the reward's group; this module's imports are made once for all ranks that are forked."""

from typing import NoReturn

from services.reward.role import RewardRole, check_config
from services.roles.model_check import check_models
from services.runtime.launch import run_service
from services.runtime.role import Program

PROGRAM = Program("reward", RewardRole, check_config, check_models)


def run_rank() -> NoReturn:
    """Runs one rank of the reward's group with the arguments of this process, and ends the process."""
    run_service(PROGRAM)
