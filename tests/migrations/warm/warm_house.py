"""What tests of the warm engine share."""

import random
from collections.abc import Callable

import pytest

from synvirt.errors import OutageTooLong
from synvirt.migrations.planning.retrying import has_kept_copy
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.sizes import MIB
from tests.drawn import shared_in_a_file
from tests.house import VM, Crash, House, crash_at, states

DISK = "disk-0"


@shared_in_a_file
def content(size: int = 3 * MIB, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def source_bytes(house: House, key: str = DISK) -> bytes:
    return house.platform.disk_path(VM, key).read_bytes()


def once(house: House, job: Migration, happened: Callable[[Migration], bool], do: Callable[[], object]) -> None:
    """Do it at the first commit that finds the job so."""

    def committed() -> None:
        house.store.on_commit = lambda: None
        if happened(house.store.get(job.id)):
            do()
        else:
            house.store.on_commit = committed

    house.store.on_commit = committed


def in_state(state: State) -> Callable[[Migration], bool]:
    return lambda job: job.state == state


def error(job: Migration) -> tuple[str, bool] | None:
    return (job.last_error.code, job.last_error.fatal) if job.last_error else None


def failed_as_it_was(house: House, job: Migration, code: str) -> None:
    """What is left is the copy, if one was complete."""
    assert (job.state, error(job)) == (State.FAILED, (code, True))
    keeps = states(job)[-2] is State.DELTA_SYNCING
    assert set(house.leftovers(VM)) == (house.copies() if keeps else set())
    assert has_kept_copy(job) == keeps
    assert house.platform.vm(VM)["power"] == "on"


def too_late_after_a_crash_in_the_last_copy(house: House, job: Migration, make_late: Callable[[], None]) -> None:
    """The service dies in the last copy, and comes back when the outage is over that the job may have: it is rolled back."""

    def die() -> None:
        make_late()
        house.store.on_commit = crash_at(1)

    once(house, job, lambda found: bool(found.passes) and found.passes[-1].kind == "final", die)
    with pytest.raises(Crash):
        house.run(job.id)
    house.store.on_commit = lambda: None
    house.stops.clear()
    ended = house.run(job.id)
    assert ended.last_error is not None
    assert (ended.last_error.code, ended.last_error.state) == (OutageTooLong.code, State.CUTTING_OVER)
    assert house.platform.vm(VM)["power"] == "on"
    assert ended.disks[0].volume is not None
