"""The real hypervisor: libvirt's embedded driver and QEMU, in this process."""

import contextlib
import os
import random
import re
import shutil
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.disks.nbd.server import NbdServer
from synvirt.disks.raw.files import RawReader
from synvirt.errors import DomainDefineFailed, GuestBootFailed, Internal, NotFound
from synvirt.hypervisor import Early, Lived, Volume, console, libvirt_host
from synvirt.hypervisor.domain_xml import Firmware
from synvirt.hypervisor.libvirt_host import LibvirtHost, installed_uefi
from synvirt.kvm import handing
from synvirt.kvm.connection import Connection, load
from synvirt.kvm.identity import identity_of
from synvirt.kvm.qemu_user import embedded_root
from synvirt.migrations.landing import machine_of
from synvirt.model.machine import Disk, VmManifest
from synvirt.settings import Settings
from synvirt.sizes import KIB, MIB
from tests.contracts.hypervisors import EarlyGuest, HypervisorCase, HypervisorContract, define, job, never
from tests.devices import loop_device
from tests.real import guests
from tests.running.processes import until

FOREIGN = """<domain type='qemu'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type></os></domain>"""


@pytest.fixture
def case(host: LibvirtHost, tmp_path: Path) -> Iterator[HypervisorCase]:
    def running(uuid: UUID) -> bool | None:
        domain = host._find(str(uuid))
        return None if domain is None else bool(domain.isActive())

    def power_off(uuid: UUID) -> None:
        domain = host._find(str(uuid))
        assert domain is not None
        domain.destroy()

    def add_foreign(name: str, uuid: UUID) -> None:
        host._connection.use().defineXML(FOREIGN.format(name=name, uuid=uuid))

    with contextlib.ExitStack() as closing:
        yield HypervisorCase(
            host, tmp_path, running, add_foreign, power_off, silence=lambda: None, early=lambda: _early(host, tmp_path, closing)
        )


def _show_log(host: LibvirtHost, name: str) -> None:
    """QEMU's last words, which pytest shows of a test that failed."""
    with contextlib.suppress(OSError):
        assert host._root is not None
        print((host._root / "log/qemu" / f"{name}.log").read_text()[-2000:])


def _early(host: LibvirtHost, folder: Path, closing: contextlib.ExitStack, *, block: bool = False) -> EarlyGuest:
    """The counting guest, over an export of this very process; its volume is a copy of the source already, and longer, as one
    is that is rounded up to its blocks."""
    migration = job()
    source = guests.boot_sector(folder / f"{migration.id}.source", guests.COUNTS, size=64 * MIB)
    with source.open("r+b") as file:
        file.seek(MIB)
        file.write(random.Random(22).randbytes(8 * MIB))
    sockets = closing.enter_context(tempfile.TemporaryDirectory(prefix="sv-"))
    layers = Early(str(folder / "top.qcow2"), str(folder / "between.qcow2"), f"{sockets}/0")
    whole = folder / f"{migration.id}.raw"
    shutil.copy(source, whole)
    os.truncate(whole, source.stat().st_size + 64 * KIB)
    path = closing.enter_context(loop_device(whole)) if block else str(whole)
    volume = Volume("disk1", path, "block" if block else "file", layers)
    server = NbdServer(closing.enter_context(contextlib.closing(RawReader(str(source), 0, None))))
    closing.callback(server.close)
    server.listen(Path(layers.socket))
    Path(sockets).chmod(0o711)
    handing.to_qemu(host._connection.uri, Path(layers.socket))
    host.lay(volume, source.stat().st_size)
    domain = host.domain_xml(machine_of(migration), [volume])
    host.define(domain)
    uuid = UUID(domain.uuid)
    closing.callback(_show_log, host, domain.name)
    host.start(uuid)

    def written() -> int:
        running = host._defined(uuid)
        disk = running.XMLDesc().split("<target dev='")[1].partition("'")[0]
        return int(running.blockStats(disk)[2])

    def writes() -> None:
        until(lambda: written() >= 40)
        before = written()
        until(lambda: written() >= before + 40)

    def kept(path: Path) -> None:
        counted = guests.counters(path)
        assert counted == list(range(counted[0], counted[0] + len(counted))), "a write was lost"
        after = guests.SECTOR_BYTES * guests.COUNTERS.stop
        with path.open("rb") as volume, source.open("rb") as expected:
            volume.seek(after)
            expected.seek(after)
            while piece := expected.read(MIB):
                assert volume.read(len(piece)) == piece
            assert volume.read() == bytes(64 * KIB)

    return EarlyGuest(migration, domain, volume, writes, kept)


class TestLibvirtHost(HypervisorContract):
    @pytest.fixture
    def case(self, case: HypervisorCase) -> HypervisorCase:
        return case


def test_a_guest_that_was_started_early_gets_onto_a_block_device_too(host: LibvirtHost, tmp_path: Path) -> None:
    with contextlib.ExitStack() as closing:
        guest = _early(host, tmp_path, closing, block=True)
        uuid, volume = UUID(guest.domain.uuid), guest.volume
        guest.writes()
        host.onto_volumes(uuid, [volume], never)
        host.define(host.domain_xml(machine_of(guest.migration), [replace(volume, early=None)]))
        guest.writes()
        guest.kept(Path(volume.path))
        host._defined(uuid).destroy()
        guest.kept(Path(volume.path))
        host.undefine(uuid, guest.migration.id)


def test_one_that_is_started_from_its_layers_after_they_were_committed_gets_onto_its_volume(
    host: LibvirtHost, tmp_path: Path
) -> None:
    """Defined on its volume meanwhile, it would lose at its end what it writes."""
    with contextlib.ExitStack() as closing:
        guest = _early(host, tmp_path, closing)
        uuid, volume = UUID(guest.domain.uuid), guest.volume
        guest.writes()
        host._defined(uuid).destroy()
        host.onto_volumes(uuid, [volume], never)
        host.start(uuid)
        guest.writes()
        host.define(host.domain_xml(machine_of(guest.migration), [replace(volume, early=None)]))
        assert "top.qcow2" in host._defined(uuid).XMLDesc()
        host.onto_volumes(uuid, [volume], never)
        assert "qcow2" not in host._defined(uuid).XMLDesc()
        guest.writes()
        host._defined(uuid).destroy()
        guest.kept(Path(volume.path))
        host.undefine(uuid, guest.migration.id)


@pytest.mark.parametrize("runs", [True, False], ids=["runs", "is off"])
def test_what_its_operator_changed_of_a_guests_definition_stays_when_it_is_on_its_volume(
    host: LibvirtHost, tmp_path: Path, runs: bool
) -> None:
    with contextlib.ExitStack() as closing:
        guest = _early(host, tmp_path, closing)
        uuid, volume = UUID(guest.domain.uuid), guest.volume
        domain = host._defined(uuid)
        changed = domain.XMLDesc(load().VIR_DOMAIN_XML_INACTIVE)
        changed = re.sub("<memory .*</memory>", "<memory unit='MiB'>96</memory>", changed)
        changed = changed.replace(
            "</devices>", "<interface type='user'><mac address='52:54:00:00:00:07'/></interface></devices>"
        )
        host._connection.use().defineXML(changed)
        if not runs:
            domain.destroy()
        host.onto_volumes(uuid, [volume], never)
        on_it = host.domain_xml(machine_of(guest.migration), [replace(volume, early=None)])
        host.define(on_it, [volume])
        for _ in range(2):
            root = ET.fromstring(host._defined(uuid).XMLDesc(load().VIR_DOMAIN_XML_INACTIVE))
            assert root.findtext("memory") == str(96 * KIB)
            assert "52:54:00:00:00:07" in {mac.get("address") for mac in root.iterfind("devices/interface/mac")}
            (disk,) = root.iterfind("devices/disk[@device='disk']")
            (wanted,) = ET.fromstring(on_it.xml).iterfind("devices/disk[@device='disk']")
            found, expected = (
                [one.find(what).attrib for what in ("driver", "source")]  # type: ignore[union-attr]
                for one in (disk, wanted)
            )
            assert found[0] == {"type": "raw"} | expected[0]
            assert found[1]["file"] == volume.path
            assert disk.find("backingStore") is None
            if runs and domain.isActive():
                domain.destroy()
            host.start(uuid)
            guest.writes()
            host._defined(uuid).destroy()
        guest.kept(Path(volume.path))
        host.undefine(uuid, guest.migration.id)


def test_a_guest_that_its_operator_paused_goes_over_and_stays_paused(host: LibvirtHost, tmp_path: Path) -> None:
    with contextlib.ExitStack() as closing:
        guest = _early(host, tmp_path, closing)
        uuid, volume = UUID(guest.domain.uuid), guest.volume
        guest.writes()
        domain = host._defined(uuid)
        domain.suspend()
        host.onto_volumes(uuid, [volume], never)
        assert domain.state() == [load().VIR_DOMAIN_PAUSED, load().VIR_DOMAIN_PAUSED_USER]
        guest.kept(Path(volume.path))
        domain.resume()
        guest.writes()
        guest.kept(Path(volume.path))
        host.undefine(uuid, guest.migration.id)


def test_a_start_that_libvirt_does_not_remember_is_seen_and_so_is_a_definition_that_somebody_changed(
    case: HypervisorCase, host: LibvirtHost
) -> None:
    domain = define(case)
    uuid = UUID(domain.uuid)
    host.start(uuid)
    case.power_off(uuid)
    host._defined(uuid).undefine()
    host.define(domain)
    assert host.lived(uuid) == Lived(runs=False, trace="its console has a log")
    host.console_log(uuid).unlink()
    assert host.lived(uuid) == Lived(runs=False, trace=None)
    log = str(host.console_log(uuid)).replace("&", "&amp;")
    assert log in domain.xml
    host._connection.use().defineXML(domain.xml.replace(log, "/dev/null"))
    changed = host.lived(uuid)
    assert changed is not None
    assert "its definition was changed" in str(changed.trace)


def test_a_disk_that_does_not_boot_is_reported_by_its_console(case: HypervisorCase) -> None:
    uuid = UUID(define(case).uuid)
    case.hypervisor.start(uuid)
    with pytest.raises(GuestBootFailed) as caught:
        case.hypervisor.wait_until_booted(uuid, 100, never)
    assert "No bootable device" in caught.value.detail
    assert "found nothing to boot from" in caught.value.detail
    assert "boot disk" in str(caught.value.hint)


def test_a_volume_that_is_gone_does_not_start(case: HypervisorCase) -> None:
    domain = define(case)
    (case.folder / f"{domain.uuid}.raw").unlink()
    with pytest.raises(DomainDefineFailed, match=r"No such file"):
        case.hypervisor.start(UUID(domain.uuid))
    assert case.running(UUID(domain.uuid)) is False


def test_two_guests_never_share_a_volume(case: HypervisorCase) -> None:
    first, second = define(case), define(case)
    volume = case.folder / f"{second.uuid}.raw"
    volume.unlink()
    volume.hardlink_to(case.folder / f"{first.uuid}.raw")
    case.hypervisor.start(UUID(first.uuid))
    with pytest.raises(DomainDefineFailed) as caught:
        case.hypervisor.start(UUID(second.uuid))
    assert caught.value.hint == "another guest or program uses this volume"


@pytest.mark.parametrize("secure", [False, True])
def test_uefi_variables_go_with_their_domain(case: HypervisorCase, data_dir: Path, secure: bool) -> None:
    assert installed_uefi() is not None, "apt-get install ovmf"
    disks = (Disk(key="disk1", label="disk1", capacity_bytes=MIB),)
    manifest = VmManifest(
        vm_id="x", name="uefi", firmware="uefi", secure_boot=secure, tpm=secure, memory_bytes=256 * MIB, disks=disks
    )
    uuid = UUID(define(case, job(manifest)).uuid)
    case.hypervisor.start(uuid)
    assert case.running(uuid) is True
    variables = data_dir / "libvirt/lib/qemu/nvram"
    assert len(list(variables.iterdir())) == 1
    case.hypervisor.undefine(uuid, uuid)
    assert list(variables.iterdir()) == []


def test_a_domain_that_libvirt_refuses_is_our_error(case: HypervisorCase) -> None:
    domain = define(case)
    broken = domain.model_copy(
        update={"xml": domain.xml.replace('bus="virtio"', 'bus="z80"').replace('bus="sata"', 'bus="z80"')}
    )
    with pytest.raises(DomainDefineFailed, match="z80"):
        case.hypervisor.define(broken)


def test_a_guest_without_an_agent_gives_no_file(case: HypervisorCase) -> None:
    assert isinstance(case.hypervisor, LibvirtHost)
    uuid = UUID(define(case).uuid)
    case.hypervisor.start(uuid)
    with pytest.raises(Internal, match="agent"):
        case.hypervisor.read_guest_file(uuid, "/etc/hostname")
    with pytest.raises(NotFound):
        case.hypervisor.read_guest_file(UUID(int=1), "/etc/hostname")


def test_running_is_enough_where_the_setting_says_so(
    case: HypervisorCase, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.hypervisor.boot.RUNNING_SETTLE_S", 1)
    host = LibvirtHost(Settings(data_dir=data_dir).hypervisor_uri, data_dir, boot_check="running")
    uuid = UUID(define(case).uuid)
    host.start(uuid)
    assert host.wait_until_booted(uuid, 100, never) == "running"
    host.close()


def test_a_login_prompt_is_a_sign_where_no_agent_comes(
    case: HypervisorCase, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synvirt.hypervisor.boot.AGENT_GRACE_S", 1)
    uuid = UUID(define(case).uuid)
    case.hypervisor.start(uuid)
    log = data_dir / "libvirt/serial" / f"synvirt-{uuid}.log"
    deadline = time.monotonic() + 100
    # To its end: the rest of the line would come behind the prompt.
    while not (log.exists() and log.read_bytes().endswith(b"No bootable device.\r\n")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with log.open("ab") as file:
        file.write(b"\r\nweb login: ")
    assert case.hypervisor.wait_until_booted(uuid, 100, never) == "console"
    case.hypervisor.undefine(uuid, uuid)
    assert not log.exists()


def test_a_guest_that_floods_its_console_does_not_fill_the_disk(case: HypervisorCase, data_dir: Path) -> None:
    case.hypervisor.check_free(
        identity_of(case.hypervisor.domain_xml(machine_of(job()), []).xml)
    )  # opens the connection, and with it the trimming
    log = data_dir / "libvirt/serial/synvirt-flood.log"
    log.write_bytes(b"x" * (console.LOG_LIMIT_BYTES + 1))
    deadline = time.monotonic() + 30
    while log.stat().st_size > console.TAIL_BYTES:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    log.unlink()


def test_an_unreachable_hypervisor_is_our_error() -> None:
    connection = Connection("qemu+unix:///system?socket=/nonexistent/socket", lambda: None)
    with pytest.raises(DomainDefineFailed, match="cannot be opened") as caught:
        connection.use()
    assert "doctor" in str(caught.value.hint)
    connection.close()


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("qemu:///embed?root=/var/lib/synvirt/libvirt", Path("/var/lib/synvirt/libvirt")),
        ("qemu:///embed?root=/a%20b", Path("/a b")),
        ("qemu:///system", None),
        ("qemu+ssh://host/system?root=/x", None),
    ],
)
def test_the_folder_of_an_embedded_driver(uri: str, root: Path | None) -> None:
    assert embedded_root(uri) == root


@pytest.mark.parametrize(
    ("installed", "lost"), [(libvirt_host._UEFI_SECURE[:1], False), (libvirt_host._UEFI_SECURE[1:2], True)]
)
def test_variables_that_no_build_of_this_machines_kind_can_use_are_listed_as_lost(
    host: LibvirtHost,
    case: HypervisorCase,
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[Firmware, ...],
    lost: bool,
) -> None:
    """Another build here has variables of that size, so they are kept. This guest's firmware has 2 MiB."""
    monkeypatch.setattr(libvirt_host, "_UEFI_SECURE", installed)
    disks = (Disk(key="disk1", label="disk1", capacity_bytes=MIB),)
    migration = job(VmManifest(vm_id="x", name=f"lost {lost}", firmware="uefi", secure_boot=True, disks=disks))
    assert host.keep_variables(migration.id, Path("/usr/share/OVMF/OVMF_VARS_4M.ms.fd").read_bytes())
    try:
        domain = host.domain_xml(machine_of(migration), [Volume("disk1", "/dev/null", "file")])
        assert any(one.what == "uefi variables" for one in domain.differences) == lost
    finally:
        host.forget_variables(migration.id)


@pytest.mark.parametrize("secure", [False, True])
def test_the_sources_uefi_variables_are_what_the_guest_starts_with(
    host: LibvirtHost, case: HypervisorCase, data_dir: Path, secure: bool
) -> None:
    template = Path("/usr/share/OVMF/OVMF_VARS_4M.ms.fd" if secure else "/usr/share/OVMF/OVMF_VARS_4M.fd")
    assert template.exists(), "apt-get install ovmf"
    # Erased flash at the end of the store's spare block: another store than the host's own, and one that firmware accepts.
    content = template.read_bytes()[:-8] + b"\xff\xffSOURCE"
    disks = (Disk(key="disk1", label="disk1", capacity_bytes=MIB),)
    migration = job(VmManifest(vm_id="x", name=f"kept {secure}", firmware="uefi", secure_boot=secure, disks=disks))
    assert not host.keep_variables(migration.id, content[:-1]), "of no size that a firmware here expects"
    assert not host.keep_variables(migration.id, bytes(len(content))), "no variable store"
    assert host.keep_variables(migration.id, content)
    domain = define(case, migration)
    assert not any(one.what == "uefi variables" for one in domain.differences)
    found = host._find(domain.uuid)
    assert found is not None
    found.createWithFlags(load().VIR_DOMAIN_START_PAUSED)
    (variables,) = (data_dir / "libvirt/lib/qemu/nvram").iterdir()
    assert variables.read_bytes() == content
    host.undefine(UUID(domain.uuid), migration.id)
    host.forget_variables(migration.id)
    host.forget_variables(migration.id)
    assert not list((data_dir / "libvirt/variables").glob(f"*{migration.id}*")), "other tests use the folder too"
    assert not list((data_dir / "libvirt/lib/qemu/nvram").iterdir())
