"""Lets torchrun's agents find each other: alone, on loopback, or one on each machine of the group.

Plain torchrun keeps its store on every interface, whatever address it is told, and what it keeps there is pickled. Here
the store listens where it is told, and holds text (docs/adr/020-closed-groups.md, docs/adr/038-several-machines.md).
"""

import json
import math
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)

from services.runtime.failures.record import Failure, read_failure, read_text, write_failure
from splitppo import __version__

BACKEND = "closed"  # the name of both in torchrun's flags
LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)
_POLL_INTERVAL_S = 0.1
_CONNECT_TIMEOUT = timedelta(seconds=5)
_LOOK_INTERVAL_S = 1.0
# Ranks that have failed have this long to answer their callers and to leave, before torchrun ends them.
_LEAVE_S = 15.0
_TELL_S = 2.0
_MEMBERS_KEY = "members"
_MEMBER_KEY = "member/{}"  # the machine's number
_REFUSED_KEY = "refused/{}"


class CannotMeet(ValueError):
    """This machine is not one of the group's, or cannot be: its input is wrong; one sentence."""


class HasNotMet(RuntimeError):
    """The machines of the group have not met in time, or one of them has ended since; one sentence."""


def ranks_store(store: TCPStore) -> PrefixStore:
    """The store as its ranks see it, at their first and only start (services/runtime/group/process_group.py)."""
    return PrefixStore("splitppo/0", store)


def _listen(address: str, port: int) -> TCPStore:
    """A store in this process. By itself it would bind every address; it takes a socket that listens as it is."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listening = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN)
    return TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=_STORE_TIMEOUT,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),
    )


class Rendezvous(RendezvousHandler):
    """The part that both kinds share: ranks use the store of the agents, and open none of their own."""

    use_agent_store = True

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nobody joins later: there is nobody to be told."""

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True

    def tell(self, rank: int, error: str) -> None:
        """Says how a rank of this machine has ended, to the ranks of the others."""


class LoopbackRendezvous(Rendezvous):
    """One machine meets itself: torchrun's agent is number 0 of 1, in a store that listens on loopback alone."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        super().__init__(parameters)
        self._store = _listen(LOOPBACK, 0)

    def next_rendezvous(self) -> RendezvousInfo:
        where = RendezvousStoreInfo(LOOPBACK, self._store.port)
        return RendezvousInfo(PrefixStore("torchrun", self._store), rank=0, world_size=1, bootstrap_store_info=where)


@dataclass(frozen=True)
class Member:
    """The introduction of a machine; all but `host` and `start` must be the same on every machine of a group.

    Attributes:
        host: its name.
        start: of this start of torchrun there.
        version: of SplitPPO there.
        digest: of the group's configuration.
    """

    host: str
    start: str
    section: str
    nnodes: int
    num_processes: int
    digest: str
    version: str = __version__

    def refused_by(self, first: "Member", node_rank: int, where: str) -> str | None:
        """Returns a sentence on what differs from machine 0, `first`; None if nothing does."""
        here, there = f"on {self.host}, node rank {node_rank}", f"on {first.host}, node rank 0"
        if self.section != first.section:
            return (
                f"{where} is {self.section}.master_addr and master_port {here}, and {first.section}'s {there}: give"
                " each group a port of its own"
            )
        for key in ("nnodes", "num_processes"):
            mine, its = getattr(self, key), getattr(first, key)
            if mine != its:
                return f"{self.section}.{key} is {mine} {here}, and {its} {there}: give every machine the same file"
        if self.version != first.version:
            return f"{here}, is version {self.version}, {there}, {first.version}: install one version on every machine"
        if self.digest != first.digest:
            return (
                f"the configuration of {self.section.rpartition('.')[2]} {here}, is another one than {there}: give"
                " every machine the same file and overrides"
            )
        return None


class MachinesRendezvous(Rendezvous):
    """One torchrun on each machine; they meet in the store of machine 0, once for each start of the group.

    Whoever starts again after they have met ends the group that is there, and waits for the next store: so it does not
    matter who is started again first.
    """

    def __init__(self, parameters: RendezvousParameters, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(parameters)
        self._clock = clock
        details: Mapping[str, str] = parameters.config
        if "node_rank" not in details:
            raise CannotMeet(
                "a group over several machines is started by python -m services.ROLE --config FILE --node-rank N on"
                " each, with services.ROLE.nnodes in the file"
            )
        address, _, port = parameters.endpoint.rpartition(":")
        self._address, self._port = address, int(port)
        self._node_rank = int(details["node_rank"])
        self._nnodes = parameters.max_nodes
        self._timeout_s = float(details["start_timeout_s"])
        num_processes = int(details["num_processes"])
        self._first_rank = self._node_rank * (num_processes // self._nnodes)
        self._me = Member(
            socket.gethostname(),
            secrets.token_hex(8),
            details["section"],
            self._nnodes,
            num_processes,
            details["digest"],
        )
        self._where = f"{address}:{port}"
        self._store: TCPStore | None = None
        self._looked_at = -math.inf
        self._failed_at: float | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits until all machines are there, at most `services.start_timeout_s`.

        Raises:
            CannotMeet: this machine and machine 0 were not given the same, or machine 0 cannot listen.
            HasNotMet: a machine has not come.
        """
        deadline = time.monotonic() + self._timeout_s
        self._store = self._gather(deadline) if self._node_rank == 0 else self._join(deadline)
        return RendezvousInfo(
            PrefixStore("torchrun", self._store),
            rank=self._node_rank,
            world_size=self._nnodes,
            bootstrap_store_info=RendezvousStoreInfo(self._address, self._port),
        )

    def _gather(self, deadline: float) -> TCPStore:
        """Machine 0: opens the store, and closes the circle when everybody has come."""
        try:
            store = _listen(self._address, self._port)
        except OSError as error:
            key = f"{self._me.section}.master_addr and master_port"
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CannotMeet(f"cannot listen on {self._where} ({key}): {reason}") from error
        store.set(_MEMBER_KEY.format(0), json.dumps(asdict(self._me)))
        printed: set[str] = set()
        while missing := [node for node in range(self._nnodes) if not store.check([_MEMBER_KEY.format(node)])]:
            for refused in filter(None, (read_text(store, _REFUSED_KEY.format(node)) for node in missing)):
                if refused not in printed:
                    sys.stderr.write(f"a machine was refused: {refused}\n")
                    printed.add(refused)
            if time.monotonic() > deadline:
                many = ", ".join(map(str, missing))
                raise HasNotMet(f"node ranks {many} of {self._me.section} have not come within {self._timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)
        members = [json.loads(read_text(store, _MEMBER_KEY.format(node))) for node in range(self._nnodes)]
        store.set(_MEMBERS_KEY, json.dumps([member["start"] for member in members]))
        return store

    def _join(self, deadline: float) -> TCPStore:
        """Any other machine: comes to the store of machine 0, whenever there is a new one."""
        lost = ""
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((self._address, self._port), timeout=_CONNECT_TIMEOUT.total_seconds()):
                    pass  # it listens; the store's own client waits and warns at length
                store = TCPStore(
                    self._address, self._port, is_master=False, timeout=_CONNECT_TIMEOUT, wait_for_workers=False
                )
                if self._is_member(store, deadline):
                    store.set_timeout(_STORE_TIMEOUT)
                    return store
            except (OSError, RuntimeError) as error:
                lost = f": {' '.join(str(error).split())}"
            time.sleep(_POLL_INTERVAL_S)
        raise HasNotMet(
            f"the machines of {self._me.section} have not met at {self._where} within {self._timeout_s:g} s{lost}"
        )

    def _is_member(self, store: TCPStore, deadline: float) -> bool:
        """Returns True if this start of the machine has met the others; RuntimeError if the store goes meanwhile."""
        first = Member(**json.loads(store.get(_MEMBER_KEY.format(0))))
        if refused := self._me.refused_by(first, self._node_rank, self._where):
            store.set(_REFUSED_KEY.format(self._node_rank), refused)
            raise CannotMeet(refused)
        if not store.check([_MEMBERS_KEY]):
            store.set(_MEMBER_KEY.format(self._node_rank), json.dumps(asdict(self._me)))
        while not (members := read_text(store, _MEMBERS_KEY)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        if self._me.start in json.loads(members):
            return True
        before = json.loads(store.get(_MEMBER_KEY.format(self._node_rank)))["host"]
        moved = "" if before == self._me.host else f", and was on {before}: does each machine have a rank of its own?"
        again = f"node rank {self._node_rank} has been started again, on {self._me.host}{moved}"
        write_failure(ranks_store(store), Failure(self._first_rank, again))
        while time.monotonic() < deadline:  # until that group has ended, and its store with it
            store.check([_MEMBERS_KEY])
            time.sleep(_POLL_INTERVAL_S)
        return False

    def num_nodes_waiting(self) -> int:
        """Always 0; machine 0 asks from time to time, and then looks whether the group has ended elsewhere.

        Raises:
            HasNotMet: it has, and the ranks that wait for others in their start would not notice.
        """
        now = self._clock()
        if self._node_rank == 0 and self._store is not None and now - self._looked_at > _LOOK_INTERVAL_S:
            self._looked_at = now
            if failure := read_failure(ranks_store(self._store)):
                self._failed_at = self._failed_at or now
                if now - self._failed_at > _LEAVE_S:
                    raise HasNotMet(f"the group ends: rank {failure.rank}: {failure.error}")
        return 0

    def tell(self, rank: int, error: str) -> None:
        if self._store is not None:
            telling = threading.Thread(target=_tell, args=(self._store, Failure(rank, error)), daemon=True)
            telling.start()
            telling.join(_TELL_S)  # the machine with the store may be out of reach


def rendezvous(parameters: RendezvousParameters) -> Rendezvous:
    """Returns the rendezvous that fits the number of machines."""
    return MachinesRendezvous(parameters) if parameters.max_nodes > 1 else LoopbackRendezvous(parameters)


def _tell(store: TCPStore, failure: Failure) -> None:
    with suppress(RuntimeError):  # the store has gone: they know
        write_failure(ranks_store(store), failure)
