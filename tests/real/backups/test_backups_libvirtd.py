"""Guests of a libvirtd, in which several processes may ask: quiesced for a backup, and thawed though the service is killed."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest

from synvirt.backups.sources.bitmap import ByJob
from synvirt.backups.sources.guest import Ask, Sources
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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_libvirtd_that_restarts_while_a_guest_is_read_costs_nothing(host: LibvirtLab, tmp_path: Path) -> None:
    domain = host.domain(host.disk())
    domain.create()
    uri, store = f"qemu+unix:///system?socket={host.socket}", Store(f"sqlite:///{tmp_path / 'test.db'}")
    ledger, connection = MadeRows(store.backups.ledger, host="local"), Connection(uri, lambda: None)
    way = ByJob(connection, ledger, folder=lambda: host.folder / "scratch", tpm_folder=lambda: tmp_path)
    ask = Ask(
        vm_id=domain.name(),
        job_id=uuid4(),
        quiesce="off",
        base=lambda _: None,
        move=lambda _: None,
        warn=lambda *_: None,
        stop=lambda: False,
    )
    with Sources(connection, ledger, (way,)).open(ask) as held:
        host.stop_libvirtd()
        host.start_libvirtd()
        held.check_unchanged()
    domain = host.connection.lookupByUUIDString(domain.UUIDString())
    assert host.snapshots(domain) == []
    assert list((host.folder / "scratch").iterdir()) == []
    assert ledger.all() == []
    # What is asked of a connection that is lost may be asked again.
    lost = connection.use()
    host.stop_libvirtd()
    with pytest.raises(HypervisorAway), translated(Internal, "the hypervisor does not say its name"):
        lost.getHostname()
    with pytest.raises(HypervisorAway):
        connection.use()
    host.start_libvirtd()
    assert connection.use().getHostname()
    connection.close()
    store.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_guest_of_a_libvirtd_is_quiesced_and_never_left_frozen(host: LibvirtLab, sample: Sample, tmp_path: Path) -> None:
    guest = Guest(host, sample)
    uri, store = f"qemu+unix:///system?socket={host.socket}", Store(f"sqlite:///{tmp_path / 'test.db'}")
    ledger, connection = MadeRows(store.backups.ledger, host="local"), Connection(uri, lambda: None)
    reported: list[str] = []
    way = ByJob(connection, ledger, folder=lambda: host.folder / "scratch", tpm_folder=lambda: tmp_path)
    ask = Ask(
        vm_id=guest.domain.name(),
        job_id=uuid4(),
        quiesce="require",
        base=lambda _: None,
        move=reported.append,
        warn=lambda code, _: reported.append(code),
        stop=lambda: False,
    )
    with Sources(connection, ledger, (way,)).open(ask) as held:
        assert (held.quiesced, held.consistency, held.way) == (True, "filesystem", "bitmap")
        assert reported == ["quiescing", "snapshotting"]
        assert guest.ask("guest-fsfreeze-status") == "thawed"
        with closing(open_reader(held.disks[0].spec)) as reader:
            sector = bytearray(512)
            reader.read_into(0, memoryview(sector))
        assert sector[510:] == b"\x55\xaa"
        held.check_unchanged()
    assert host.snapshots(guest.domain) == []
    assert list((host.folder / "scratch").iterdir()) == []
    assert ledger.all() == []

    argv = [sys.executable, "-c", HOLDS, uri, guest.domain.name()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        assert service.stdout.readline() == "held\n"
        assert guest.ask("guest-fsfreeze-status") == "frozen"
        service.kill()
    until(lambda: guest.ask("guest-fsfreeze-status") == "thawed")
    assert guest.run("/bin/busybox", "sh", "-c", "echo alive > /alive && /bin/busybox cat /alive") == "alive\n"
    connection.close()
    store.close()
