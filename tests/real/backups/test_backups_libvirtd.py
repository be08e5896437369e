"""Guests of a libvirtd, in which several processes may ask: quiesced for a backup, and thawed though the service is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import pytest

from synvirt.backups.sources.bitmap import ByJob
from synvirt.backups.sources.guest import Ask, Sources
from synvirt.backups.sources.guest import Guest as Held
from synvirt.backups.sources.made import MadeRows
from synvirt.disks import open_reader
from synvirt.errors import HypervisorAway, Internal
from synvirt.kvm.connection import Connection, translated
from synvirt.sample import Sample
from synvirt.store import Store
from tests.real.libvirt_remote.test_libvirt_remote_warm import Guest
from tests.servers.libvirt_lab import LibvirtLab, lab, until

HOLDS = """\
import sys, time
from synvirt.kvm.connection import Connection
from synvirt.kvm.freezing import still
uri, name = sys.argv[1:]
with still(uri, Connection(uri, lambda: None).use().lookupByName(name)) as found:
    print(found.why_not or "held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def host() -> Iterator[LibvirtLab]:
    with lab(boots=True) as running:
        yield running


class Service:
    """What a service reads the host's guests by. `reported`: what it is told of a run."""

    def __init__(self, host: LibvirtLab, folder: Path) -> None:
        self.uri, self.reported = f"qemu+unix:///system?socket={host.socket}", list[str]()
        self._store = Store(f"sqlite:///{folder / 'test.db'}")
        self.ledger, self.connection = MadeRows(self._store.backups.ledger, host="local"), Connection(self.uri, lambda: None)
        way = ByJob(self.connection, self.ledger, folder=lambda: host.folder / "scratch", tpm_folder=lambda: folder)
        self._sources = Sources(self.connection, self.ledger, (way,))

    def reads(self, domain: Any, quiesce: Literal["off", "require"]) -> AbstractContextManager[Held]:
        ask = Ask(
            vm_id=domain.name(),
            job_id=uuid4(),
            quiesce=quiesce,
            base=lambda _: None,
            move=self.reported.append,
            warn=lambda code, _: self.reported.append(code),
            stop=lambda: False,
        )
        return self._sources.open(ask)

    def close(self) -> None:
        self.connection.close()
        self._store.close()


@pytest.fixture
def service(host: LibvirtLab, tmp_path: Path) -> Iterator[Service]:
    with closing(Service(host, tmp_path)) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_libvirtd_that_restarts_while_a_guest_is_read_costs_nothing(host: LibvirtLab, service: Service) -> None:
    domain = host.domain(host.disk())
    domain.create()
    with service.reads(domain, "off") as held:
        host.stop_libvirtd()
        host.start_libvirtd()
        held.check_unchanged()
    domain = host.connection.lookupByUUIDString(domain.UUIDString())
    assert host.snapshots(domain) == []
    assert list((host.folder / "scratch").iterdir()) == []
    assert service.ledger.all() == []
    # What is asked of a connection that is lost may be asked again.
    lost = service.connection.use()
    host.stop_libvirtd()
    with pytest.raises(HypervisorAway), translated(Internal, "the hypervisor does not say its name"):
        lost.getHostname()
    with pytest.raises(HypervisorAway):
        service.connection.use()
    host.start_libvirtd()
    assert service.connection.use().getHostname()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_of_a_libvirtd_is_quiesced_and_never_left_frozen(host: LibvirtLab, sample: Sample, service: Service) -> None:
    guest = Guest(host, sample)
    with service.reads(guest.domain, "require") as held:
        assert (held.quiesced, held.consistency, held.way) == (True, "filesystem", "bitmap")
        assert service.reported == ["quiescing", "snapshotting"]
        assert guest.ask("guest-fsfreeze-status") == "thawed"
        with closing(open_reader(held.disks[0].spec)) as reader:
            sector = bytearray(512)
            reader.read_into(0, memoryview(sector))
        assert sector[510:] == b"\x55\xaa"
        held.check_unchanged()
    assert host.snapshots(guest.domain) == []
    assert list((host.folder / "scratch").iterdir()) == []
    assert service.ledger.all() == []

    argv = [sys.executable, "-c", HOLDS, service.uri, guest.domain.name()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as holding:
        assert holding.stdout is not None
        assert holding.stdout.readline() == "held\n"
        assert guest.ask("guest-fsfreeze-status") == "frozen"
        holding.kill()
    until(lambda: guest.ask("guest-fsfreeze-status") == "thawed")
    assert guest.run("/bin/busybox", "sh", "-c", "echo alive > /alive && /bin/busybox cat /alive") == "alive\n"
