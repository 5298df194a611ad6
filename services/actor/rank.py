"""One rank of the actor's group; this module's imports are made once for all ranks that are forked."""

from typing import NoReturn

from services.actor.role import ActorRole, check_config, check_models
from services.runtime.launch import run_service


def run_rank() -> NoReturn:
    """Runs one rank of the actor's group with the arguments of this process, and ends the process."""
    run_service("actor", ActorRole, check_config=check_config, check_models=check_models)
