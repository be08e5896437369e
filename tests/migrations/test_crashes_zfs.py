"""The service dies after every commit, and after every command to zfs; the operator cancels at every commit.

On a fake zfs, whose volumes are real block devices.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.destinations.zfs import ZfsDestination
from synvirt.destinations.zfs_command import Zfs
from synvirt.errors import Conflict
from synvirt.model.job import Migration
from synvirt.model.kinds import State
from tests.contracts.destinations import SIZE, write
from tests.fakes.workers import in_process
from tests.fakes.zfs import FakeZfs
from tests.house import Crash, House, crash_at, offline_plan
from tests.needs import need, need_root

CONTENT = random.Random(21).randbytes(300_000) + bytes(200_000) + random.Random(22).randbytes(777)
# More than any job here commits, or any sequence here commands.
TURNS_MAX = 60


class CrashingZfs(Zfs):
    """The service dies when the given command, counted from 1, has been carried out."""

    def __init__(self, program: str, turn: int) -> None:
        super().__init__(program)
        self.left = turn

    def __call__(self, *arguments: str) -> str:
        said = super().__call__(*arguments)
        self.left -= 1
        if self.left == 0:
            raise Crash
        return said


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Callable[[], FakeZfs]]:
    """Makes fakes of zfs, each with a pool of its own."""
    need_root("losetup")
    need("losetup", "mount")
    made: list[FakeZfs] = []

    def make() -> FakeZfs:
        made.append(FakeZfs(tmp_path / f"zfs-{len(made)}"))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


def over(fake: FakeZfs, zfs: Zfs | None = None) -> ZfsDestination:
    return ZfsDestination("tank", "synvirt", zfs=zfs or Zfs(fake.program), devices=fake.devices, name_of=fake.name_of)


def submitted(house: House) -> Migration:
    folder = house.imports / "appliance"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(CONTENT)
    return house.intake.submit(offline_plan(folder))


def house_in(folder: Path, fake: FakeZfs) -> House:
    folder.mkdir(exist_ok=True)
    return House(folder, destination=over(fake), workers=in_process)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_crash_after_every_commit_is_survived(tmp_path: Path, fakes: Callable[[], FakeZfs]) -> None:
    for commit in range(1, TURNS_MAX):
        fake, folder = fakes(), tmp_path / f"crash-{commit}"
        house = house_in(folder, fake)
        job = submitted(house)
        house.store.on_commit = crash_at(commit)
        crashed = False
        try:
            house.run(job.id)
        except Crash:
            crashed = True
        house.close()
        again = house_in(folder, fake)
        ended = again.run(job.id)
        assert ended.state == State.COMPLETED, ended.last_error
        assert again.volume(ended).read_bytes()[: len(CONTENT)] == CONTENT
        assert len(fake.volumes()) == 1
        again.close()
        fake.close()
        if not crashed:
            return
    pytest.fail("the job never stops committing")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_cancel_at_every_commit_leaves_no_dataset(tmp_path: Path, fakes: Callable[[], FakeZfs]) -> None:
    for commit in range(1, TURNS_MAX):
        fake = fakes()
        house = house_in(tmp_path / f"cancel-{commit}", fake)
        job = submitted(house)
        cancelled = _cancel_at(commit, house, job)
        ended = house.run(job.id)
        house.close()
        if ended.state == State.CANCELLED:
            assert list(fake.datasets()) == ["tank", "tank/synvirt", "tank/synvirt/migrations"][: len(fake.datasets())]
            continue
        assert ended.state == State.COMPLETED
        if not cancelled():
            return
    pytest.fail("the job never stops committing")


def _cancel_at(commit: int, house: House, job: Migration) -> Callable[[], bool]:
    seen = itertools.count(1)
    asked: list[int] = []

    def committed() -> None:
        if next(seen) == commit:
            asked.append(commit)
            house.store.on_commit = lambda: None
            with contextlib.suppress(Conflict):
                house.intake.cancel(job.id)

    house.store.on_commit = committed
    return lambda: bool(asked)


@pytest.mark.timeout(300)
def test_a_crash_after_every_command_is_survived(fakes: Callable[[], FakeZfs]) -> None:
    """A volume made and destroyed: each is begun again from the start by whoever comes after."""
    fake = fakes()
    for turn in range(1, TURNS_MAX):
        job, zfs = uuid4(), CrashingZfs(fake.program, turn)
        name = over(fake).volume_name(job, "disk")
        for step in (_make, _destroy):
            with contextlib.suppress(Crash):
                step(over(fake, zfs), name)
            step(over(fake), name)
        assert list(fake.datasets()) == ["tank", "tank/synvirt", "tank/synvirt/migrations"]
        if zfs.left > 0:
            assert turn > 5
            return
    pytest.fail("the sequence never stops commanding")


def _make(destination: ZfsDestination, name: str) -> None:
    destination.create(name, SIZE)
    write(destination, name, SIZE, 0, b"whole")


def _destroy(destination: ZfsDestination, name: str) -> None:
    destination.destroy(name)
