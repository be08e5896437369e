"""What a job remembers is read from the store once, and is what the store has."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import PersistFailed
from synvirt.jobs.stop import Stop
from synvirt.migrations.job import Job
from synvirt.migrations.memory import JobMemory, PassMemory
from tests.fakes.workers import in_process
from tests.house import House, offline_plan


@pytest.fixture
def house(tmp_path: Path) -> Any:
    made = House(tmp_path / "house", workers=in_process)
    yield made
    made.close()


@pytest.fixture
def job(house: House) -> Job:
    return Job(house.intake.submit(offline_plan(house.imports)), house.rooms, Stop())


@pytest.fixture
def reads(house: House, monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[type, int]]:
    """How often the store was asked, by kind and pass."""
    found, get = Counter[tuple[type, int]](), house.store.memory.get

    def counted(job_id: Any, kind: Any, number: int = 0) -> Any:
        found[kind, number] += 1
        return get(job_id, kind, number)

    monkeypatch.setattr(house.store.memory, "get", counted)
    return found


def test_each_row_is_read_once(job: Job, house: House, reads: Counter[tuple[type, int]]) -> None:
    async def step() -> None:
        for _ in range(3):
            assert (await job.memory()).downs == 0
            assert (await job.memory_of(2)).retakes is None
        await job.note(downs=1)
        await job.note_of(2, retakes=3)
        assert ((await job.memory()).downs, (await job.memory_of(2)).retakes) == (1, 3)

    asyncio.run(step())
    assert reads == {(JobMemory, 0): 1, (PassMemory, 2): 1}
    assert house.store.memory.get(job.id, PassMemory, 2).retakes == 3


def test_what_a_job_remembers_already_is_not_written_again(job: Job, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    written, change = list[int](), house.store.memory.change

    def noted(*given: Any) -> Any:
        written.append(given[3])
        return change(*given)

    monkeypatch.setattr(house.store.memory, "change", noted)

    async def step() -> None:
        for downs in (1, 1, 2, 2, 1):
            await job.note(downs=downs)
            await job.note_of(3, downs=downs, retakes=None)

    asyncio.run(step())
    assert written == [0, 3] * 3
    assert [house.store.memory.get(job.id, JobMemory).downs, house.store.memory.get(job.id, PassMemory, 3).downs] == [1, 1]


def test_what_the_store_has_forgotten_the_job_has_forgotten(job: Job) -> None:
    async def step() -> int:
        for number in (1, 2, 3):
            await job.note_of(number, downs=number)
        await job.fold_passes(3)
        return sum([(await job.memory_of(number)).downs for number in (1, 2, 3)])

    assert asyncio.run(step()) == 1 + 3


def test_notes_at_once_are_all_there(job: Job) -> None:
    async def step() -> JobMemory:
        await asyncio.gather(job.note(downs=2), job.memory(), job.note(cbt_resets=1), job.memory(), job.note(way="own"))
        return await job.memory()

    found = asyncio.run(step())
    assert (found.downs, found.cbt_resets, found.way) == (2, 1, "own")
    assert found == job.rooms.store.memory.get(job.id, JobMemory)


def test_a_note_whose_commit_was_not_answered_is_looked_for(job: Job, house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    change = house.store.memory.change

    def unanswered(*arguments: Any) -> None:
        change(*arguments)
        raise PersistFailed("the database went away")

    async def step() -> int:
        assert (await job.memory()).downs == 0
        monkeypatch.setattr(house.store.memory, "change", unanswered)
        with pytest.raises(PersistFailed):
            await job.note(downs=1)
        return (await job.memory()).downs

    assert asyncio.run(step()) == 1
