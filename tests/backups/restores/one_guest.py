"""A service that restores a guest in place whose domain is in memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from defusedxml import ElementTree

from synvirt.backups.model import BackupRun, RestoreRequest
from synvirt.backups.restores.host import RestoreHost
from synvirt.errors import HypervisorAway, SourceRunning
from tests.backups.house import House
from tests.fakes.backups import backups_of
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of

# What the guest's disk holds in its point, and now.
THEN, NOW = b"then" * 1000, b"now" * 1000


class Guest:
    """A domain of libvirt's. `runs_at`: the looks at which it runs, counted from 1."""

    def __init__(self, xml: str) -> None:
        self.xml, self.looks, self.runs_at = xml, 0, range(0)
        self.is_saved, self.snapshots, self.away = False, 0, 0

    def isActive(self) -> bool:  # noqa: N802 - libvirt's names
        self.looks += 1
        return self.looks in self.runs_at

    def hasManagedSaveImage(self) -> bool:  # noqa: N802
        return self.is_saved

    def XMLDesc(self, _flags: int) -> str:  # noqa: N802
        return self.xml

    def UUIDString(self) -> str:  # noqa: N802
        return str(UUID(int=7))

    def name(self) -> str:
        return str(ElementTree.fromstring(self.xml).findtext("name"))

    def snapshotNum(self) -> int:  # noqa: N802
        return self.snapshots

    def listAllCheckpoints(self, _flags: int) -> list[Any]:  # noqa: N802
        return []


class Host(RestoreHost):
    """It has one guest. `guest.away`: how many look-ups find no libvirtd."""

    guest: Guest

    def domain(self, lookup: str, key: str) -> Any:
        if self.guest.away:
            self.guest.away -= 1
            raise HypervisorAway("client socket is closed")
        return self.guest


class OneGuest(House):
    """A service with a point of the guest."""

    def __init__(self, folder: Path, xml: str = XML) -> None:
        super().__init__(folder, started=False)
        self.is_alone = False
        self.disk = folder / "images/web"
        self.guest = Guest(xml.replace("/images/web", str(self.disk)))
        self.guests.xml = self.guest.xml
        self.image("web", THEN)
        made = restore_host_of(folder, FakeHypervisor())
        connection: Any = SimpleNamespace(uri=made.connection.uri, use=lambda: SimpleNamespace(defineXML=self.defined))
        own = {"connection": connection, "alone": self.alone}
        host = Host(**{one.name: getattr(made, one.name) for one in fields(made)} | own)
        object.__setattr__(host, "guest", self.guest)
        self.host = host
        self.begin()
        (self.point,) = self.run(self.job("web")).restore_point_ids

    def begin(self) -> None:
        """A service."""
        self.backups = backups_of(self.store, self.guests, self.folder, restore_host=self.host)
        self.backups.start()

    @contextmanager
    def alone(self, vm_id: str, stop: Callable[[], bool]) -> Iterator[None]:
        self.is_alone = True
        yield
        self.is_alone = False

    def defined(self, xml: str) -> None:
        self.guest.xml = xml

    def restored(self, *disks: str) -> BackupRun | None:
        """None: it was refused at once."""
        try:
            run = self.backups.restore(self.point, RestoreRequest(target="in_place", disks=disks))
        except SourceRunning:
            return None
        return self.ended(run)
