"""The first failure of a group, in its store: where every rank, and torchrun on every machine, finds it and leaves."""

import json
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store

_KEY = "splitppo/failure"


@dataclass(frozen=True)
class Failure:
    """What happened to a rank, and in which phase it was (empty: none)."""

    rank: int
    error: str
    phase: str = ""


def write_failure(store: Store, failure: Failure) -> None:
    """Leaves a failure in a store, unless there is one; `store` is as the ranks see it (`ranks_store`)."""
    store.compare_set(_KEY, "", json.dumps(asdict(failure)))


def read_failure(store: Store) -> Failure | None:
    """Returns the first failure, if there is any."""
    content = read_text(store, _KEY)
    return Failure(**json.loads(content)) if content else None


def read_text(store: Store, key: str) -> str:
    """Returns what a store holds under a key, without waiting for it; empty if there is nothing."""
    return store.get(key).decode() if store.check([key]) else ""
