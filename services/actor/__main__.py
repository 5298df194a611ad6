"""`torchrun ... -m services.actor --config FILE [key=value ...] [--check]`: one rank of the actor's group."""

from services.actor.role import ActorRole
from services.runtime.launch import run_service
from splitppo.config.rollout_packages import check_rollout_packages

if __name__ == "__main__":
    run_service("actor", ActorRole, check_config=check_rollout_packages)
