"""The first failure of a group, as it stands in the group's store for every rank, and for torchrun on every machine."""

import json
from dataclasses import asdict, dataclass

from torch.distributed.distributed_c10d import Store

_KEY = "splitppo/failure"


@dataclass(frozen=True)
class Failure:
    """The failure of a rank: its error, and the phase it was in (empty: none)."""

    rank: int
    error: str
    phase: str = ""


def write_failure(store: Store, failure: Failure) -> None:
    """Writes a failure to a store that has none yet; `store` is as the ranks see it (`ranks_store`)."""
    store.compare_set(_KEY, "", json.dumps(asdict(failure)))


def read_failure(store: Store) -> Failure | None:
    """Returns the first failure of the group; None without one."""
    content = read_text(store, _KEY)
    return Failure(**json.loads(content)) if content else None


def read_text(store: Store, key: str) -> str:
    """Returns the text under a key of a store, without waiting for it; empty if there is none."""
    return store.get(key).decode() if store.check([key]) else ""
