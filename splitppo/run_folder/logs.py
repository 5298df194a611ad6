"""The names of the logs of a run."""

from collections.abc import Sequence

LOGS = "logs"
CONTROLLER_LOG = "controller_0.log"
ENVIRONMENTS_LOG = "environments.log"
TRACKERS_LOG = "trackers.log"


def log_of_rank(role: str, rank: int) -> str:
    """Returns the name of the log of a rank."""
    return f"{role}_{rank:d}.log"


def log_before(name: str) -> str:
    """Returns the name that a log of a rank gets when its group is started again."""
    return f"{name}.old"


def log_of_torchrun(role: str) -> str:
    """Returns the name of the file with what torchrun and its ranks print."""
    return f"{role}_torchrun.log"


def log_of_template(roles: Sequence[str]) -> str:
    """Returns the name of the file with what the process prints from which the groups of these roles are forked."""
    return f"{'_'.join(roles)}_template.log"
