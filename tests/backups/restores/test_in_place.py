"""Restores in place of a guest in memory, which is started at any moment. Kills at each moment, on libvirt: tests/kinds."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import fields
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from synvirt.backups.model import BackupRun, RestoreRequest, Status
from synvirt.backups.restores import present
from synvirt.backups.restores.domain import Place
from synvirt.backups.restores.host import RestoreHost
from synvirt.backups.restores.in_place import _Restored
from synvirt.errors import Cancelled, SourceRunning
from synvirt.jobs.orders import DiskOrder
from synvirt.repository.specs import FolderSpec, PointSpec, RepositorySpec
from tests.backups.house import House
from tests.fakes.backups import backups_of
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of
from tests.kinds.runs import rows_left
from tests.needs import need_libvirt

THEN, NOW = b"then" * 1000, b"now" * 1000


class Guest:
    """A domain of libvirt's. `runs_at`: the looks at which it runs, counted from 1."""

    def __init__(self, xml: str) -> None:
        self.xml, self.looks, self.runs_at = xml, 0, range(0)

    def isActive(self) -> bool:  # noqa: N802 - libvirt's names
        self.looks += 1
        return self.looks in self.runs_at

    def hasManagedSaveImage(self) -> bool:  # noqa: N802
        return False

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        return self.xml

    def UUIDString(self) -> str:  # noqa: N802
        return str(UUID(int=7))

    def name(self) -> str:
        return "web"

    def snapshotNum(self) -> int:  # noqa: N802
        return 0

    def listAllCheckpoints(self, _flags: int) -> list[Any]:  # noqa: N802
        return []


class Host(RestoreHost):
    """It has one guest."""

    guest: Guest

    def domain(self, lookup: str, key: str) -> Any:
        return self.guest


class OneGuest(House):
    """A service with a point of the guest."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, started=False)
        self.disk = folder / "images/web"
        self.guest = Guest(XML.replace("/images/web", str(self.disk)))
        self.guests.xml = self.guest.xml
        self.image("web", THEN)
        made = restore_host_of(folder, FakeHypervisor())
        connection: Any = SimpleNamespace(uri=made.connection.uri, use=lambda: SimpleNamespace(defineXML=self.defined))
        host = Host(**{one.name: getattr(made, one.name) for one in fields(made)} | {"connection": connection})
        object.__setattr__(host, "guest", self.guest)
        self.backups = backups_of(self.store, self.guests, folder, restore_host=host)
        self.backups.start()
        (self.point,) = self.run(self.job("web")).restore_point_ids

    def defined(self, xml: str) -> None:
        self.guest.xml = xml

    def restored(self) -> BackupRun | None:
        """None: it was refused at once."""
        try:
            run = self.backups.restore(self.point, RestoreRequest(target="in_place"))
        except SourceRunning:
            return None
        return self.ended(run)


@pytest.fixture
def house(tmp_path: Path) -> Iterator[OneGuest]:
    need_libvirt()
    with closing(OneGuest(tmp_path)) as made:
        yield made


@pytest.mark.parametrize("looks", [1, 1000], ids=["and is off again at once", "and runs on"])
def test_a_guest_that_is_started_at_any_moment_has_its_own_disk_and_the_restore_has_failed(house: OneGuest, looks: int) -> None:
    """It has opened its file, and may have written to it: that file has its name, and nothing of the restore is left."""
    for moment in count(1):
        house.image("web", NOW)
        before, house.guest.looks, house.guest.runs_at = house.disk.stat().st_ino, 0, range(moment, moment + looks)
        run = house.restored()
        left = [one.name for one in (house.folder / "images").iterdir()] + rows_left(house.store)
        assert left == ["web"]
        if house.guest.looks < moment:
            assert run is not None
            assert (run.status, house.disk.read_bytes() == THEN) == (Status.COMPLETED, True)
            break
        assert run is None or (run.status, run.error and run.error.code) == (Status.FAILED, "E_BAK_SOURCE_RUNNING"), moment
        assert (house.disk.stat().st_ino, house.disk.read_bytes() == NOW) == (before, True), moment
    assert moment > 5, "it is looked at more than once"


@pytest.mark.parametrize(("asked", "error"), [(False, SourceRunning), (True, Cancelled)])
def test_a_guest_that_ran_for_a_moment_is_why_the_copy_onto_its_device_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool, error: type[Exception]
) -> None:
    """It is off again when that is looked at: nobody has cancelled the restore."""

    def copied(_order: DiskOrder, stop: Callable[[], bool]) -> None:
        monkeypatch.setattr(present, "runs", lambda _: True)
        assert stop()
        monkeypatch.setattr(present, "runs", lambda _: False)
        raise Cancelled

    under_way = SimpleNamespace(run=SimpleNamespace(id=UUID(int=1)), stop=lambda: asked, warn=lambda *_: None)
    copying: Any = SimpleNamespace(under_way=under_way, copy=copied)
    nothing: Any = None
    restored = _Restored(nothing, nothing, copying, lambda: Guest(""), resumed=False)
    device = tmp_path / "device"
    device.touch()
    spec = PointSpec(repository=RepositorySpec(place=FolderSpec(path="/x"), key=""), point_id="", number=0)
    with pytest.raises(error):
        restored._device("vda", Place(str(device), "block"), 0, spec)
