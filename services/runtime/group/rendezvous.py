"""The rendezvous of torchrun's agents: of one machine alone on loopback, or of all machines of a group.

The store of plain torchrun listens on every interface, whatever address it is given, and its values are pickled. Here
the store listens on one address and contains text (docs/adr/020-closed-groups.md).
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
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from services.runtime.failures.record import Failure, read_failure, read_text, write_failure
from splitppo import __version__
from splitppo.config_error import sentence_of

BACKEND = "closed"  # the name of this rendezvous in torchrun's flags
LOOPBACK = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)
_POLL_INTERVAL_S = 0.1
_CONNECT_TIMEOUT = timedelta(seconds=5)
_LOOK_INTERVAL_S = 1.0
# Ranks that have failed get this long to answer their callers and to exit, before torchrun ends them.
_LEAVE_S = 15.0
_TELL_S = 2.0
_MEMBERS_KEY = "members"
_MEMBER_KEY = "member/{}"  # the machine's number
_REFUSED_KEY = "refused/{}"


class CannotMeet(ValueError):
    """This machine cannot join the rendezvous because its input is wrong; the message is one sentence."""


class HasNotMet(RuntimeError):
    """The machines of a group did not all join in time, or one has ended since; the message is one sentence."""


def ranks_store(store: TCPStore) -> PrefixStore:
    """Wraps the rendezvous store in the key prefix that process_group.py uses; ranks start once, so it is constant."""
    return PrefixStore("splitppo/0", store)


class Rendezvous(StaticTCPRendezvous):
    """The torchrun rendezvous of a group on one machine: agent 0 of 1, with a store that listens on loopback alone.

    As in torch's static rendezvous, the ranks use the store of the agents, and nobody joins later. `world_size`
    machines meet at `master_addr`:`master_port`, and this one is number `rank` of them.
    """

    def __init__(self, run_id: str, address: str = LOOPBACK, port: int = 0, rank: int = 0, world_size: int = 1) -> None:
        super().__init__(address, port, rank, world_size, run_id, timeout=0)
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        """Waits for all machines; returns this machine's rank, their number and the store, as torchrun expects them."""
        self._store = store = self._meet()
        where = RendezvousStoreInfo(self.master_addr, store.port)
        return RendezvousInfo(PrefixStore("torchrun", store), self.rank, self.world_size, where)

    def _meet(self) -> TCPStore:
        """Opens a TCPStore in this process on one address; without a given socket it would listen on all interfaces."""
        family = socket.AF_INET6 if ":" in self.master_addr else socket.AF_INET
        address = (self.master_addr, self.master_port)
        listening = socket.create_server(address, family=family, backlog=socket.SOMAXCONN)
        return TCPStore(
            self.master_addr,
            listening.getsockname()[1],
            is_master=True,
            timeout=_STORE_TIMEOUT,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listening.detach(),
        )

    def tell(self, rank: int, error: str) -> None:
        """Tells the ranks of other machines that a rank of this machine has ended, and how; no-op for one machine."""


@dataclass(frozen=True)
class Member:
    """The data that a machine sends when it joins; all but `host` and `start` must be equal on all machines.

    Attributes:
        host: name of the machine.
        start: random id of this start of torchrun.
        version: of SplitPPO.
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
        """Compares this machine with machine 0, `first`; returns a sentence about the difference, None without one."""
        here = f"on {self.host}, node rank {node_rank}"
        there = f"on {first.host}, node rank 0"
        if self.section != first.section:
            return (
                f"{where} is {self.section}.master_addr and master_port {here}, and {first.section}'s {there}: give"
                " each group a port of its own"
            )
        for key in ("nnodes", "num_processes"):
            mine = getattr(self, key)
            its = getattr(first, key)
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
    """The torchrun rendezvous of a group on several machines, in the store of machine 0, at each start of the group.

    A machine that starts again after the rendezvous ends the running group, and waits for the next store. So the
    order in which the machines are started again does not matter.
    """

    def __init__(self, parameters: RendezvousParameters, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads what the launcher has written into torchrun's parameters; CannotMeet if plain torchrun was called."""
        details: Mapping[str, str] = parameters.config
        if "node_rank" not in details:
            raise CannotMeet(
                "a group over several machines is started by python -m services.ROLE --config FILE --node-rank N on"
                " each, with services.ROLE.nnodes in the file"
            )
        address, _, port = parameters.endpoint.rpartition(":")
        super().__init__(parameters.run_id, address, int(port), int(details["node_rank"]), parameters.max_nodes)
        self._clock = clock
        self._timeout_s = float(details["start_timeout_s"])
        num_processes = int(details["num_processes"])
        self._first_rank = self.rank * (num_processes // self.world_size)
        self._me = Member(
            socket.gethostname(),
            secrets.token_hex(8),
            details["section"],
            self.world_size,
            num_processes,
            details["digest"],
        )
        self._where = parameters.endpoint
        self._looked_at = -math.inf
        self._failed_at: float | None = None

    def _meet(self) -> TCPStore:
        """Waits until all machines have joined, at most `services.start_timeout_s`; returns the store of machine 0.

        Raises:
            CannotMeet: this machine and machine 0 differ in configuration or version, or machine 0 cannot listen.
            HasNotMet: a machine has not joined in time.
        """
        deadline = time.monotonic() + self._timeout_s
        return self._gather(deadline) if self.rank == 0 else self._join(deadline)

    def _gather(self, deadline: float) -> TCPStore:
        """Opens the store on machine 0, waits until all machines have joined, and returns the store."""
        try:
            store = super()._meet()
        except OSError as error:
            key = f"{self._me.section}.master_addr and master_port"
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise CannotMeet(f"cannot listen on {self._where} ({key}): {reason}") from error
        store.set(_MEMBER_KEY.format(0), json.dumps(asdict(self._me)))
        printed: set[str] = set()
        while missing := [node for node in range(self.world_size) if not store.check([_MEMBER_KEY.format(node)])]:
            for refused in filter(None, (read_text(store, _REFUSED_KEY.format(node)) for node in missing)):
                if refused not in printed:
                    sys.stderr.write(f"a machine was refused: {refused}\n")
                    printed.add(refused)
            if time.monotonic() > deadline:
                many = ", ".join(map(str, missing))
                raise HasNotMet(f"node ranks {many} of {self._me.section} have not come within {self._timeout_s:g} s")
            time.sleep(_POLL_INTERVAL_S)
        members = [json.loads(read_text(store, _MEMBER_KEY.format(node))) for node in range(self.world_size)]
        store.set(_MEMBERS_KEY, json.dumps([member["start"] for member in members]))
        return store

    def _join(self, deadline: float) -> TCPStore:
        """Connects this machine, not machine 0, to machine 0's new store as soon as it exists; returns the store."""
        lost = ""
        while time.monotonic() < deadline:
            try:
                address = self.master_addr
                port = self.master_port
                with socket.create_connection((address, port), timeout=_CONNECT_TIMEOUT.total_seconds()):
                    pass  # it listens; the store's own client waits and warns at length
                store = TCPStore(address, port, is_master=False, timeout=_CONNECT_TIMEOUT, wait_for_workers=False)
                if self._is_member(store, deadline):
                    store.set_timeout(_STORE_TIMEOUT)
                    return store
            except (OSError, RuntimeError) as error:
                lost = f": {sentence_of(error)}"
            time.sleep(_POLL_INTERVAL_S)
        raise HasNotMet(
            f"the machines of {self._me.section} have not met at {self._where} within {self._timeout_s:g} s{lost}"
        )

    def _is_member(self, store: TCPStore, deadline: float) -> bool:
        """Registers this machine in the store; True once all machines have joined; RuntimeError if the store fails.

        A machine that comes when all have met, e.g. started again after its end, is no member of that group. Such a
        machine ends the group by a failure that names it, and waits until the store is gone; then it may join the next
        group.

        Raises:
            CannotMeet: machine 0 has another configuration, version or group.
        """
        first = Member(**json.loads(store.get(_MEMBER_KEY.format(0))))
        if refused := self._me.refused_by(first, self.rank, self._where):
            store.set(_REFUSED_KEY.format(self.rank), refused)
            raise CannotMeet(refused)
        if not store.check([_MEMBERS_KEY]):
            store.set(_MEMBER_KEY.format(self.rank), json.dumps(asdict(self._me)))
        while not (members := read_text(store, _MEMBERS_KEY)):
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_INTERVAL_S)
        if self._me.start in json.loads(members):
            return True
        before = json.loads(store.get(_MEMBER_KEY.format(self.rank)))["host"]
        moved = "" if before == self._me.host else f", and was on {before}: does each machine have a rank of its own?"
        again = f"node rank {self.rank} has been started again, on {self._me.host}{moved}"
        write_failure(ranks_store(store), Failure(self._first_rank, again))
        while time.monotonic() < deadline:  # until that group has ended, and its store with it
            store.check([_MEMBERS_KEY])
            time.sleep(_POLL_INTERVAL_S)
        return False

    def num_nodes_waiting(self) -> int:
        """Returns 0. torchrun calls it regularly; machine 0 then checks if the group has failed on another machine.

        Raises:
            HasNotMet: the group has failed; ranks that still wait for other ranks to start would not notice it.
        """
        now = self._clock()
        if self.rank == 0 and self._store is not None and now - self._looked_at > _LOOK_INTERVAL_S:
            self._looked_at = now
            if failure := read_failure(ranks_store(self._store)):
                self._failed_at = self._failed_at or now
                if now - self._failed_at > _LEAVE_S:
                    raise HasNotMet(f"the group ends: rank {failure.rank}: {failure.error}")
        return 0

    def tell(self, rank: int, error: str) -> None:
        """Writes a failure to the group's store, where the ranks of all machines read it; does nothing without a store.

        It waits a few seconds at most and reports no failure of its own, because this machine ends anyway.
        """
        if (store := self._store) is None:
            return

        def write() -> None:
            with suppress(RuntimeError):  # the store has gone, so the other machines know
                write_failure(ranks_store(store), Failure(rank, error))

        telling = threading.Thread(target=write, daemon=True)
        telling.start()
        telling.join(_TELL_S)  # the machine with the store may be out of reach


def rendezvous(parameters: RendezvousParameters) -> Rendezvous:
    """Creates the torchrun rendezvous for a group: for one machine, or for several if max_nodes is over 1."""
    return MachinesRendezvous(parameters) if parameters.max_nodes > 1 else Rendezvous(parameters.run_id)
