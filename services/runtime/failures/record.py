"""The first failure of a group, in its store: where every rank, and torchrun on every machine, finds it and leaves."""

import json
from dataclasses import dataclass

from torch.distributed.distributed_c10d import Store

_KEY = "splitppo/failure"


@dataclass(frozen=True)
class Failure:
    """What happened to a rank, and in which phase it was (empty: none)."""

    rank: int
    error: str
    phase: str = ""


def write_failure(store: Store, failure: Failure) -> None:
    """Leaves it there, unless there is one; `store` is as the ranks see it (`ranks_store`)."""
    content = {"rank": failure.rank, "phase": failure.phase, "error": failure.error}
    store.compare_set(_KEY, "", json.dumps(content))


def read_failure(store: Store) -> Failure | None:
    """The first one, if there is any."""
    content = store.get(_KEY) if store.check([_KEY]) else b""
    return Failure(**json.loads(content)) if content else None
