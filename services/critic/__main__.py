"""`torchrun ... -m services.critic --config FILE [key=value ...] [--check]`: one rank of the critic's group."""

from services.critic.engine import CriticRole
from services.shell.launch import run_service

if __name__ == "__main__":
    run_service("critic", CriticRole)
