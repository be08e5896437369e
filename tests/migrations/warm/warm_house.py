"""What tests of the warm engine share."""

import random
from collections.abc import Callable

from synvirt.migrations.planning.retrying import has_kept_copy
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.sizes import MIB
from tests.house import VM, House, states

DISK = "disk-0"


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
