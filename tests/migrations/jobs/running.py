"""Helpers of the tests of whole jobs: disks, a folder to import, how a job is run, and a service that dies."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.model.job import Migration
from synvirt.model.plan import MigrationPlan
from synvirt.sizes import KIB, MIB
from tests.drawn import shared_in_a_file
from tests.house import VM, House

DISK = "disk-0"


@shared_in_a_file
def some_disk(size: int = 3 * MIB, seed: int = 1) -> bytes:
    """Data and zeros in turn, of a size that is a whole number of nothing."""
    source = random.Random(seed)
    blocks = [source.randbytes(64 * KIB) if source.random() < 0.6 else bytes(64 * KIB) for _ in range(size // (64 * KIB))]
    return b"".join(blocks) + source.randbytes(1536)


def imported(house: House, disks: dict[str, bytes] | None = None) -> Path:
    folder = house.imports / "appliance"
    folder.mkdir()
    for key, content in (disks or {DISK: some_disk()}).items():
        (folder / f"{key}.raw").write_bytes(content)
    return folder


def run(house: House, plan: MigrationPlan) -> Migration:
    return house.run(house.intake.submit(plan).id)


def error_code(job: Migration) -> str | None:
    return job.last_error.code if job.last_error else None


class Died(BaseException):
    pass


def crash_when(house: House, happened: Callable[[], bool]) -> Callable[[], None]:
    def committed() -> None:
        house.store.on_commit = lambda: None
        if happened():
            raise Died("the service died")
        house.store.on_commit = committed

    return committed


def run_until_death(house: House, job: Migration, happened: Callable[[], bool]) -> None:
    """The service dies at the first commit after which `happened()` is True."""
    house.store.on_commit = crash_when(house, happened)
    with pytest.raises(Died, match="died"):
        house.run(job.id)
    house.store.on_commit = lambda: None


def flushed(house: House, job: Migration) -> bool:
    return bool(house.store.watermarks(job.id, 1))


def source_bytes(house: House) -> bytes:
    return house.platform.disk_path(VM, DISK).read_bytes()
