"""Devices that the critic's group and the rollout group share: one computes at a time, and updates come first."""

from __future__ import annotations

import asyncio

import pytest

from controller.sampling.devices import Devices
from splitppo.rpc.errors import InvalidArgument, Place, Unavailable
from tests.support.call_log import DEADLINE_S


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("are_shared", [False, True], ids=["own devices", "the critic's devices"])
async def test_only_on_shared_devices_a_rollout_group_waits_for_the_update_and_holds_the_critic_up(
    *, are_shared: bool
) -> None:
    devices = Devices(are_shared=are_shared)
    is_updated, has_sampled, began = asyncio.Event(), asyncio.Event(), list[str]()
    devices.after_critic_update = is_updated.wait  # type: ignore[assignment]

    async def compute(role: str) -> None:
        async with devices.turn_of(role):
            began.append(role)
            if role == "rollout":
                await has_sampled.wait()

    sampling = asyncio.create_task(compute("rollout"))
    await settle()
    assert began == ([] if are_shared else ["rollout"])
    is_updated.set()
    await settle()
    computing = [asyncio.create_task(compute(role)) for role in ("critic", "actor")]
    await settle()
    assert began == (["rollout", "actor"] if are_shared else ["rollout", "critic", "actor"])
    has_sampled.set()
    await asyncio.gather(sampling, *computing)
    assert sorted(began) == ["actor", "critic", "rollout"]


async def test_a_turn_ends_also_if_the_work_fails() -> None:
    devices = Devices(are_shared=True)
    with pytest.raises(InvalidArgument):
        async with devices.turn_of("rollout"):
            raise InvalidArgument("", Place(role="rollout"))
    async with asyncio.timeout(DEADLINE_S), devices.turn_of("critic"):
        pass


async def test_a_failed_update_of_the_critic_is_the_error_of_who_waits_and_nothing_is_sampled() -> None:
    devices = Devices(are_shared=True)

    async def update() -> None:
        raise Unavailable("the group is lost", Place(role="critic"))

    devices.after_critic_update = update
    began = list[str]()
    with pytest.raises(Unavailable):
        async with devices.turn_of("rollout"):
            began.append("rollout")
    assert began == []
    async with asyncio.timeout(DEADLINE_S), devices.turn_of("critic"):
        pass
