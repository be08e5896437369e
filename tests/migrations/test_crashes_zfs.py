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
from synvirt.migrations import patience
from synvirt.model.kinds import State
from tests.contracts.destinations import SIZE, write
from tests.fakes.workers import in_process
from tests.fakes.zfs import SUSPENDED, FakeZfs
from tests.fakes.zfs_here import answered_here
from tests.house import VM, Crash, House, live_plan
from tests.needs import need, need_root
from tests.patience import quick_tries

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


def test_a_job_goes_on_when_its_suspended_pool_does(
    tmp_path: Path, fakes: Callable[[], FakeZfs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disks were away for a moment. Before, the job failed at once, and a copy of days with it."""
    quick_tries(monkeypatch)
    monkeypatch.setattr(patience, "SHOWN_FROM_S", 0.0)
    fake = fakes()
    house = House(tmp_path / "house", destination=over(fake), workers=in_process)
    house.platform.add_vm(VM, {"disk-0": CONTENT})
    job = house.intake.submit(live_plan(mode="Cold"))
    shown: list[str] = []

    def committed() -> None:
        house.store.on_commit = lambda: None
        found = house.store.get(job.id)
        if not shown and found.state is State.COPYING_FULL and not (fake.folder / SUSPENDED).exists():
            fake.suspend()
        elif found.last_error is not None and (fake.folder / SUSPENDED).exists():
            shown.append(found.last_error.message)
            fake.clear()
        house.store.on_commit = committed

    house.store.on_commit = committed
    ended = house.run(job.id)
    assert ended.state is State.COMPLETED, ended.last_error
    assert ended.last_error is None
    assert "pool I/O is currently suspended. It is tried again" in shown[0]
    house.close()
