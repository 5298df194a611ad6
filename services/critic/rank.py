"""One rank of the critic's group; this module's imports are made once for all ranks that are forked."""

from typing import NoReturn

from services.critic.role import CriticRole, check_config, give_cache_back
from services.roles.model_check import check_models
from services.runtime.launch import run_service
from services.runtime.role import Program

PROGRAM = Program("critic", CriticRole, check_config, check_models, adapt=give_cache_back)


def run_rank() -> NoReturn:
    """Runs one rank of the critic's group with the arguments of this process, and ends the process."""
    run_service(PROGRAM)
