"""Backup runs have slots, over all hosts: before a guest is held, for as long as it is copied, and no longer."""

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

from synvirt.backups.limits import Limits
from synvirt.backups.model import RestoreRequest
from synvirt.errors import BackupInternal
from synvirt.jobs.slots import Slots, guests_of, repository
from synvirt.store.store import StoreAway
from tests.backups.house import House, disk_content
from tests.fakes.backups import backups_of
from tests.running.processes import until

LONG_S = 100
OTHER = UUID(int=9)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    """One run of a repository at a time. Another host is there, with a service of its own."""
    made = House(tmp_path, started=False)
    made.backups.close()
    slots = Slots(made.store.slots, host="local")
    limits = Limits(slots, "local", per_repository=1, per_host=2, per_destination=1)
    made.backups = backups_of(made.store, made.guests, tmp_path, limits=limits)
    made.backups.start()
    made.image("web", disk_content())
    yield made
    made.close()


def _key(house: House, repository_id: UUID) -> str:
    return repository(house.backups.repositories.opened(repository_id).id, most=1).key


def test_a_run_waits_for_another_host_before_its_guest_is_held_and_leaves_nothing(house: House) -> None:
    job = house.job("web")
    opened = threading.Event()
    house.guests.gate = opened.set
    key = _key(house, job.repository_id)
    assert house.store.slots.take(OTHER, {key: 1}, host="other")
    run = house.backups.run_job(job.id)
    until(lambda: house.store.slots.count(key) == (1, 1))
    assert not opened.is_set()
    assert house.store.slots.counts() == {key: (1, 1), guests_of("local", most=2).key: (0, 1)}
    house.store.slots.leave(OTHER)
    assert house.ended(run).status == "completed"
    assert house.store.slots.counts() == {}


def test_a_run_that_waits_can_be_cancelled_and_stands_in_no_line_then(house: House) -> None:
    job = house.job("web")
    key = _key(house, job.repository_id)
    assert house.store.slots.take(OTHER, {key: 1}, host="other")
    run = house.backups.run_job(job.id)
    until(lambda: house.store.slots.count(key) == (1, 1))
    house.backups.runs.cancel(run.id)
    assert house.ended(run).status == "cancelled"
    assert house.store.slots.counts() == {key: (1, 0)}


def test_a_run_keeps_its_slot_for_as_long_as_it_copies_and_gives_it_on(house: House) -> None:
    job = house.job("web")
    go, opened = threading.Event(), threading.Event()

    def gate() -> None:
        opened.set()
        go.wait(LONG_S)

    house.guests.gate = gate
    run = house.backups.run_job(job.id)
    assert opened.wait(LONG_S)
    key = _key(house, job.repository_id)
    assert house.store.slots.count(key) == (1, 0)
    assert not house.store.slots.take(OTHER, {key: 1}, host="other")
    go.set()
    assert house.ended(run).status == "completed"
    assert house.store.slots.take(OTHER, {key: 1}, host="other")


@pytest.mark.parametrize("kind", ["a point", "a repository", "garbage"])
def test_a_verification_or_a_collection_waits_and_a_restore_does_not(house: House, kind: str) -> None:
    job = house.job("web")
    (point,) = house.run(job).restore_point_ids
    key = _key(house, job.repository_id)
    assert house.store.slots.take(OTHER, {key: 1}, host="other")
    begin = {
        "a point": lambda: house.backups.verify(point),
        "a repository": lambda: house.backups.verify_repository(job.repository_id),
        "garbage": lambda: house.backups.collect(job.repository_id, dry_run=True),
    }
    waits = begin[kind]()
    until(lambda: house.store.slots.count(key) == (1, 1))
    assert house.ended(house.backups.restore(point, RestoreRequest(target="export"))).status == "completed"
    assert house.store.slots.count(key) == (1, 1)
    house.store.slots.leave(OTHER)
    assert house.ended(waits).status == "completed"
    assert house.store.slots.counts() == {}


def test_what_a_killed_service_held_is_free_once_its_host_starts_over(house: House) -> None:
    house.store.hosts.begin("local", ttl_s=1000, document="{}")
    job = house.job("web")
    key = _key(house, job.repository_id)
    assert house.store.slots.take(uuid4(), {key: 1}, host="local")
    house.store.hosts.begin("local", ttl_s=1000, document="{}")
    assert house.run(job).status == "completed"


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_ends_while_the_store_fails_leaves_no_slot(
    house: House, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Nobody else would ever give it back. `fails`: with its guest; else it is away after the collection, the last step."""
    job, left, calls = house.job("web"), house.store.slots.leave, count()

    def away(*arguments: Any) -> None:
        if fails or next(calls) == 1:
            raise StoreAway("the store failed: server closed the connection unexpectedly")
        left(*arguments)

    def broken() -> None:
        raise BackupInternal("the guest's disks cannot be held")

    monkeypatch.setattr(house.store.slots, "leave", away)
    monkeypatch.setattr(house.guests, "gate", broken if fails else lambda: None)
    run = house.run(job)
    assert run.status == ("failed" if fails else "completed")
    assert fails or "garbage was not collected" in run.warnings[0].message
    assert house.store.slots.counts() == {}
