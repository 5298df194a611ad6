"""`torchrun ... -m services.critic --config FILE [key=value ...] [--check]`: one rank of the critic's group."""

from services.critic.role import CriticRole
from services.runtime.launch import run_service

if __name__ == "__main__":
    run_service("critic", CriticRole)
