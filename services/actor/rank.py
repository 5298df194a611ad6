"""One rank of the actor's group; this module's imports are made once for all ranks that are forked."""

from typing import NoReturn

from services.actor.role import ActorRole, check_config, check_models
from services.rollout.backends import maps_memory_of_others
from services.runtime.launch import run_service
from services.runtime.role import Program
from splitppo.config import Config


def _memory_grows(config: Config) -> bool:
    return not ("actor" in config.sampling_roles and maps_memory_of_others(config))


PROGRAM = Program("actor", ActorRole, check_config, check_models, memory_grows=_memory_grows)


def run_rank() -> NoReturn:
    """Runs one rank of the actor's group with the arguments of this process, and ends the process."""
    run_service(PROGRAM)
