"""The service dies after every command to zfs, in turn: on a fake zfs, whose volumes are real block devices. What it does after
every commit: tests/kinds."""

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.destinations.zfs import ZfsDestination
from synvirt.destinations.zfs_command import Zfs
from tests.contracts.destinations import SIZE, write
from tests.fakes.zfs import FakeZfs
from tests.fakes.zfs_here import answered_here
from tests.house import Crash
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
        output = super().__call__(*arguments)
        self.left -= 1
        if self.left == 0:
            raise Crash
        return output


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Callable[[], FakeZfs]]:
    """Makes fakes of zfs, each with a pool of its own."""
    need_root("losetup")
    need("losetup", "mount")
    made: list[FakeZfs] = []

    def make() -> FakeZfs:
        made.append(FakeZfs(tmp_path / f"zfs-{len(made)}"))
        return made[-1]

    with answered_here():
        yield make
    for fake in made:
        fake.close()


def over(fake: FakeZfs, zfs: Zfs | None = None) -> ZfsDestination:
    return ZfsDestination("tank", "synvirt", zfs=zfs or Zfs(fake.program), devices=fake.devices, name_of=fake.name_of)


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
