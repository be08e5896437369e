"""Helpers of the tests of patience: a job that is held, and a source that has a trouble at a certain moment."""

from collections.abc import Callable

from synvirt.model.job import Migration
from synvirt.model.kinds import State
from synvirt.model.problems import Problem
from synvirt.sizes import MIB
from tests.house import VM, House, live_plan

DISK = "disk-0"
CODES = {
    "unreachable": "E_MIG_SOURCE_UNREACHABLE",
    "snapshot_failed": "E_MIG_SNAPSHOT_FAILED",
    "wrong_password": "E_MIG_AUTH_FAILED",
}

FOR_EVER = 1_000_000


def code(problem: Problem | None) -> tuple[str, bool] | None:
    return None if problem is None else (problem.code, problem.fatal)


def copied_once(house: House, job: Migration) -> bool:
    """Its first pass is all that was copied whole, and the volume is what the source is."""
    whole = [one.number for one in job.passes if one.bytes >= 3 * MIB or one.whole]
    return whole == [1] and house.volume(job).read_bytes() == house.platform.disk_path(VM, DISK).read_bytes()


def at_commits(house: House, job: Migration, looked: Callable[[Migration], bool]) -> None:
    """`looked` is shown the job at each commit, until it has seen enough."""

    def committed() -> None:
        house.store.on_commit = lambda: None
        if not looked(house.store.get(job.id)):
            house.store.on_commit = committed

    house.store.on_commit = committed


def held(house: House, *, first_delta_done: bool = True) -> tuple[Migration, Callable[[Migration], bool]]:
    job = house.intake.submit(live_plan(warm={"cutover": "manual", "interval_s": 1}))

    def reached(now: Migration) -> bool:
        return now.state is State.DELTA_SYNCING and len([one for one in now.passes if one.finished_at]) == 1 + first_delta_done

    return job, reached


def refused_once_off(house: House, job: Migration, *, times: int) -> None:
    """The source refuses its password as soon as the guest is off for the cut-over."""

    def looked(now: Migration) -> bool:
        off = now.state is State.CUTTING_OVER and house.platform.vm(VM)["power"] == "off"
        if off:
            house.platform.fault("wrong_password", times)
        return off

    at_commits(house, job, looked)
