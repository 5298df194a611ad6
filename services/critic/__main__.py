"""`python -m services.critic --config FILE [key=value ...]` starts the critic's group, or under torchrun one rank."""

from services.runtime.group.command_line import start_group_unless_rank
from splitppo.machine.heavy_imports import heavy_imports

if __name__ == "__main__":
    start_group_unless_rank("critic")
    # Imported now: a process that becomes torchrun needs no models.
    with heavy_imports():
        from services.critic.rank import run_rank

    run_rank()
