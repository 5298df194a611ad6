"""Machines of a group meet in any order; a machine that starts again ends the group, and all meet anew."""

from __future__ import annotations

import errno
import gc
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousParameters

from services.runtime.failures.record import Failure, read_failure, write_failure
from services.runtime.group.rendezvous import (
    CannotMeet,
    HasNotMet,
    MachinesRendezvous,
    Member,
    Rendezvous,
    ranks_store,
    rendezvous,
)
from tests.support.groups import free_address, wait_until

ME = Member("two", "b", "services.actor", nnodes=2, num_processes=4, digest="d")
FIRST = Member("one", "a", "services.actor", nnodes=2, num_processes=4, digest="d")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def machine(endpoint: str, node_rank: int, **options: Any) -> MachinesRendezvous:
    clock = {"clock": options.pop("clock")} if "clock" in options else {}
    details = {"section": "services.actor", "num_processes": 2, "digest": "d", "ifname": "lo", "start_timeout_s": 30}
    parameters = RendezvousParameters(
        "closed",
        endpoint,
        "none",
        2,
        2,
        node_rank=str(node_rank),
        **{k: str(v) for k, v in (details | options).items()},
    )
    return MachinesRendezvous(parameters, **clock)


def places(*meetings: Future[RendezvousInfo]) -> list[tuple[int, int]]:
    return [(info.rank, info.world_size) for info in (meeting.result(30) for meeting in meetings)]


@pytest.mark.parametrize("first", [0, 1])
def test_machines_meet_whoever_comes_first(threads: ThreadPoolExecutor, first: int) -> None:
    endpoint = free_address()
    meetings = {}
    for node_rank in (first, 1 - first):
        meetings[node_rank] = threads.submit(machine(endpoint, node_rank).next_rendezvous)
    assert places(meetings[0], meetings[1]) == [(0, 2), (1, 2)]
    where = meetings[1].result().bootstrap_store_info
    assert f"{where.master_addr}:{where.master_port}" == endpoint, "where the ranks are sent"


def test_a_machine_that_starts_again_ends_the_group_and_meets_the_next_one(threads: ThreadPoolExecutor) -> None:
    endpoint = free_address()
    near, far = machine(endpoint, 0), machine(endpoint, 1)
    meeting = threads.submit(far.next_rendezvous)
    store = near.next_rendezvous().store.underlying_store
    meeting.result(30)
    again = threads.submit(machine(endpoint, 1).next_rendezvous)
    failure = wait_until(partial(read_failure, ranks_store(store)), what="the group hears of it")
    assert failure.rank == 1
    assert "node rank 1 has been started again, on " in failure.error
    assert not again.done()
    near = store = None
    gc.collect()  # as the end of its process would: the store is gone
    assert places(threads.submit(machine(endpoint, 0).next_rendezvous), again) == [(0, 2), (1, 2)]


def test_machine_0_ends_when_a_group_whose_ranks_do_not_see_it_has_failed(threads: ThreadPoolExecutor) -> None:
    endpoint, now = free_address(), [0.0]
    near, far = machine(endpoint, 0, clock=lambda: now[0]), machine(endpoint, 1)
    meeting = threads.submit(far.next_rendezvous)
    store = near.next_rendezvous().store.underlying_store
    meeting.result(30)
    assert near.num_nodes_waiting() == 0
    write_failure(ranks_store(store), Failure(1, "was ended by SIGKILL"))
    now[0] = 10.0
    assert near.num_nodes_waiting() == 0, "the ranks have time to say it"
    now[0] = 30.0
    with pytest.raises(HasNotMet, match="rank 1: was ended by SIGKILL"):
        near.num_nodes_waiting()
    assert far.num_nodes_waiting() == 0, "it never asks a store that may be out of reach"


@pytest.mark.parametrize(
    ("mine", "sentence"),
    [
        (
            {"nnodes": 3},
            "services.actor.nnodes is 3 on two, node rank 1, and 2 on one, node rank 0: give every",
        ),
        ({"num_processes": 6}, "services.actor.num_processes is 6 on two, node rank 1, and 4 on one, node rank 0"),
        ({"version": "9.9"}, "on two, node rank 1, is version 9.9, on one, node rank 0, "),
        ({"digest": "e"}, "the configuration of actor on two, node rank 1, is another one than on one, node rank 0"),
        (
            {"section": "services.critic"},
            "one:29500 is services.critic.master_addr and master_port on two, node rank 1, and services.actor's on one,"
            " node rank 0: give each group a port of its own",
        ),
    ],
)
def test_machines_that_were_given_different_things_do_not_meet(mine: dict[str, Any], sentence: str) -> None:
    said = replace(ME, **mine).refused_by(FIRST, 1, "one:29500")
    assert said is not None
    assert said.startswith(sentence)


def test_machines_that_were_given_the_same_do() -> None:
    assert ME.refused_by(FIRST, 1, "one:29500") is None


def test_a_machine_that_is_refused_says_so_on_both(threads: ThreadPoolExecutor, capfd: Any) -> None:
    endpoint = free_address()
    waiting = threads.submit(machine(endpoint, 0, start_timeout_s=3).next_rendezvous)
    with pytest.raises(CannotMeet, match="num_processes is 4 on "):
        machine(endpoint, 1, num_processes=4).next_rendezvous()
    with pytest.raises(HasNotMet, match=r"node ranks 1 of services\.actor have not come within 3 s"):
        waiting.result(30)
    assert "a machine was refused: services.actor.num_processes is 4" in capfd.readouterr().err


def test_a_port_that_another_group_has_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(CannotMeet) as refused:
            machine(endpoint, 0).next_rendezvous()
    key = "services.actor.master_addr and master_port"
    assert str(refused.value) == f"cannot listen on {endpoint} ({key}): {os.strerror(errno.EADDRINUSE)}"


def test_machine_0_that_is_not_there_is_waited_for_and_named() -> None:
    endpoint = free_address()
    with pytest.raises(HasNotMet, match=rf"the machines of services\.actor have not met at {endpoint} within 1 s: "):
        machine(endpoint, 1, start_timeout_s=1).next_rendezvous()


def test_a_rank_that_two_machines_have_is_said_by_the_second(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = free_address()
    near, far = machine(endpoint, 0), machine(endpoint, 1)
    meeting = threads.submit(far.next_rendezvous)
    store = near.next_rendezvous().store.underlying_store
    meeting.result(30)
    monkeypatch.setattr(socket, "gethostname", lambda: "three")
    again = threads.submit(machine(endpoint, 1, start_timeout_s=2).next_rendezvous)
    failure = wait_until(partial(read_failure, ranks_store(store)), what="the group hears of it")
    assert "has been started again, on three, and was on " in failure.error
    assert failure.error.endswith("does each machine have a rank of its own?")
    with pytest.raises(HasNotMet):
        again.result(30)


def test_flags_of_torchrun_alone_start_no_group_of_several_machines() -> None:
    with pytest.raises(CannotMeet, match="is started by python -m services"):
        rendezvous(RendezvousParameters("closed", "127.0.0.1", "none", 2, 2))


def test_one_machine_meets_itself_on_loopback() -> None:
    alone = rendezvous(RendezvousParameters("closed", "127.0.0.1", "none", 1, 1))
    assert type(alone) is Rendezvous
    info = alone.next_rendezvous()
    assert (info.rank, info.world_size, info.bootstrap_store_info.master_addr) == (0, 1, "127.0.0.1")
