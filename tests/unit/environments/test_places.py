"""Programs have so many places: who waits for the policy makes room, who works keeps its place."""

from __future__ import annotations

import asyncio

from environments.programs.places import Place, Places


class Program:
    """Takes a place, and leaves it when it is asked to."""

    def __init__(self, places: Places) -> None:
        self.is_asked = asyncio.Event()
        self.place: Place | None = None
        self._places = places
        self.task = asyncio.create_task(self._live())

    async def _live(self) -> None:
        async with self._places.place(self.is_asked.set) as self.place:
            await self.is_asked.wait()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_only_idle_programs_are_asked_to_leave_and_one_for_each_who_waits() -> None:
    places = Places(2)
    first, second, third = (Program(places) for _ in range(3))
    await settle()
    assert first.place is not None
    assert second.place is not None
    assert third.place is None
    assert not first.is_asked.is_set()
    places.set_idle(second.place, is_idle=True)
    places.set_idle(first.place, is_idle=True)
    await settle()
    assert (first.is_asked.is_set(), second.is_asked.is_set()) == (False, True)
    assert third.place is not None
    fourth = Program(places)
    await settle()
    assert first.is_asked.is_set()
    assert fourth.place is not None
    programs = (first, second, third, fourth)
    for program in programs:
        program.is_asked.set()
    await asyncio.gather(*(program.task for program in programs))


async def test_who_no_longer_waits_takes_no_place() -> None:
    places = Places(1)
    first = Program(places)
    await settle()
    second, third, fourth = (Program(places) for _ in range(3))
    await settle()
    second.task.cancel()
    await settle()
    first.is_asked.set()
    third.task.cancel()  # at the moment in which a place becomes free
    await settle()
    assert fourth.place is not None
    fourth.is_asked.set()
    await fourth.task
    assert (second.task.cancelled(), third.task.cancelled()) == (True, True)
    last = Program(places)
    await settle()
    assert last.place is not None
    last.is_asked.set()
    await last.task
