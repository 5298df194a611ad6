"""Writes and reads the first failure of a group in the group's store, for every rank and every torchrun."""

import json
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store

_KEY = "splitppo/failure"


@dataclass(frozen=True)
class Failure:
    """The failure of one rank: the rank, the error as text, and the phase of its command (empty: none)."""

    rank: int
    error: str
    phase: str = ""


def write_failure(store: Store, failure: Failure) -> None:
    """Writes a rank's failure to the group's store unless one is there; `store` has the prefix of `ranks_store`."""
    store.compare_set(_KEY, "", json.dumps(asdict(failure)))


def read_failure(store: Store) -> Failure | None:
    """Reads the group's first failure from its store; None while no rank has failed."""
    content = read_text(store, _KEY)
    return Failure(**json.loads(content)) if content else None


def read_text(store: Store, key: str) -> str:
    """Reads the text under a key of a store without waiting for the key; empty if the store lacks the key."""
    return store.get(key).decode() if store.check([key]) else ""
