"""Restores on real libvirt and QEMU: a new domain, in place, and a boot test; and what is left of those that fail."""

import base64
import os
import shutil
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from defusedxml import ElementTree

from synvirt.backups.model import RestorePoint, RestoreRequest
from synvirt.backups.restores import domain as restoring_domain
from synvirt.errors import BackupBadRequest, BackupConflict, BackupNotFound, SourceRunning
from synvirt.hypervisor.hardware import own_mac
from synvirt.hypervisor.libvirt_host import LibvirtHost, installed_uefi
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.settings import Settings
from synvirt.sizes import MIB
from tests.backups.test_authors import swap_after_check
from tests.devices import loop_device
from tests.drawn import drawn
from tests.fakes.restoring import as_a_volume
from tests.needs import lacking, need, need_root
from tests.real.backups.restores import Room
from tests.real.guests import FILLS, WRITES, boot_sector

XML = """<domain type='{type}'><name>{name}</name><uuid>{uuid}</uuid><memory unit='MiB'>64</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='{machine}'>hvm</type></os><devices>
<disk type='file' device='disk'><driver name='qemu' type='{format}' cache='none' io='native'/><source file='{path}'/>
<target dev='vda' bus='virtio'/><serial>kept-serial</serial></disk>
<disk type='file' device='cdrom'><source file='/nowhere/setup.iso'/><target dev='sda' bus='sata'/><readonly/></disk>
<interface type='bridge'><mac address='52:54:00:12:34:56'/><source bridge='{bridge}'/><model type='virtio'/></interface>
<graphics type='vnc' port='5999' autoport='no'/>{more}</devices></domain>"""
DiskUsage = namedtuple("DiskUsage", "total used free")
NVRAM_TOO = 4  # VIR_DOMAIN_UNDEFINE_NVRAM


def disk_content() -> bytes:
    return drawn(CHUNK_BYTES + 512, zeros=2 * CHUNK_BYTES)


@pytest.fixture
def room(host: LibvirtHost, data_dir: Path, tmp_path: Path) -> Iterator[Room]:
    quick = LibvirtHost(Settings(data_dir=data_dir).hypervisor_uri, data_dir, boot_activity_s=6)
    made = Room(quick, data_dir, tmp_path)
    yield made
    made.close()
    quick.close()


def xml(path: Path, **values: str) -> str:
    known = {"type": "qemu", "name": "guest", "uuid": str(uuid4()), "machine": "q35", "format": "raw", "bridge": "nobridge0"}
    return XML.format(**{**known, "more": "", **values}, path=path)


def image(room: Room, content: bytes | None = None, name: str = "disk.raw") -> Path:
    path = room.folder / "images" / name
    path.write_bytes(disk_content() if content is None else content)
    return path


def content_of(path: Path, format_: str = "raw") -> bytes:
    raw = path.with_suffix(".read")
    subprocess.run([need("qemu-img", "qemu-utils"), "convert", "-f", format_, "-O", "raw", path, raw], check=True)
    content = raw.read_bytes()
    raw.unlink()
    return content


def nothing_left(room: Room, point: RestorePoint) -> None:
    """Of a restore that has failed: no volume, no domain, no note."""
    assert [path.name for path in room.volumes.rglob("*")] == []
    assert room.names().isdisjoint({point.vm_name, "restored"})
    assert room.store.ledgers.owned("run", host="local") == []


def test_a_point_becomes_a_new_domain_with_an_identity_of_its_own(room: Room) -> None:
    old = uuid4()
    point = room.point(xml(image(room), uuid=str(old)), {"vda": image(room)}, vm_id=old)
    run = room.restored(point, target="new_domain", name="restored")
    assert (run.status, run.error) == ("completed", None)
    assert run.domain is not None
    domain = room.connection.use().lookupByUUIDString(str(run.domain.uuid))
    assert not domain.isActive(), "it is not started unless that is asked for"
    found: Any = ElementTree.fromstring(domain.XMLDesc(0))
    assert found.findtext("name") == run.domain.name == "restored"
    assert found.findtext("uuid") != str(old)
    assert found.find("devices/interface/mac").get("address") != "52:54:00:12:34:56"
    disk = found.find("devices/disk[@device='disk']")
    assert disk.findtext("serial") == "kept-serial"
    volume = Path(disk.find("source").get("file"))
    assert volume.is_relative_to(room.volumes)
    assert [volume.read_bytes() == disk_content()] == [True]
    assert found.find("devices/disk[@device='cdrom']/source") is None
    reported = " ".join(warning.message for warning in run.warnings)
    assert "nobridge0" in reported, "the bridge that is missing is told"
    assert "/nowhere/setup.iso" in reported
    assert room.store.ledgers.owned("run", host="local") == [], "it is its user's from here on"
    with pytest.raises(BackupConflict, match="restored"):
        room.backups.restore(point.id, RestoreRequest(target="new_domain", name="restored"))
    again = room.restored(point, target="new_domain", name="restored-twice")
    assert (again.status, again.error) == ("completed", None)
    # libvirt's driver has this name for its lock, and a guest would take it.
    as_the_driver = room.restored(point, target="new_domain", name="driver")
    assert as_the_driver.domain is not None
    assert as_the_driver.domain.name == "vm-driver"


def test_a_machine_that_this_host_has_not_is_refused_before_anything_is_copied(room: Room) -> None:
    point = room.point(xml(image(room), machine="pc-q35-99.0"), {"vda": image(room)})
    run = room.restored(point, target="new_domain")
    assert run.error is not None
    assert (run.error.code, run.progress.bytes_done) == ("E_BAK_HOST_LACKS", 0)
    assert "pc-q35-99.0" in run.error.message
    nothing_left(room, point)


def test_a_bridge_that_is_missing_is_refused_where_the_guest_shall_start(room: Room) -> None:
    point = room.point(xml(image(room)), {"vda": image(room)})
    run = room.restored(point, target="new_domain", start=True)
    assert run.error is not None
    assert run.error.code == "E_BAK_HOST_LACKS"
    assert "nobridge0" in run.error.message
    nothing_left(room, point)


def test_a_destination_or_a_folder_without_room_is_said_before_anything_is_written(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    uuid = uuid4()
    disk = image(room)
    definition = xml(disk, uuid=str(uuid), name="without-room")
    room.connection.use().defineXML(definition)
    point = room.point(definition, {"vda": disk}, vm_id=uuid)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: DiskUsage(10, 0, 1000))
    for target in ("new_domain", "in_place"):
        run = room.restored(point, target=target)
        assert run.error is not None
        assert (run.error.code, "1000" in run.error.message) == ("E_BAK_DISK_WRITE_FAILED", True)
        nothing_left(room, point)
    assert [path.name for path in disk.parent.iterdir()] == ["disk.raw"]


def test_damage_leaves_nothing_of_a_new_domain(room: Room) -> None:
    point = room.point(xml(image(room)), {"vda": image(room)})
    _damage(room)
    run = room.restored(point, target="new_domain")
    assert run.error is not None
    assert run.error.code == "E_BAK_DAMAGED"
    nothing_left(room, point)


@pytest.mark.parametrize("kind", ["new_domain", "boot_test"])
def test_a_point_that_is_swapped_after_its_author_was_checked_becomes_no_guest(
    room: Room, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = boot_sector(room.folder / "images/disk.raw", WRITES)
    point = room.point(xml(disk), {"vda": disk})
    swap_after_check(monkeypatch, room.folder, room.backups.repositories, point)
    backups = room.backups
    begun = (
        backups.boot_test(point.id) if kind == "boot_test" else backups.restore(point.id, RestoreRequest(target="new_domain"))
    )
    run = room.ended(begun)
    assert run.error is not None
    assert run.error.code == "E_BAK_DAMAGED"
    assert "not the one whose author was checked" in run.error.message
    assert backups.points.get(point.id).boot_test is None
    _nothing_of_the_test(room, run.id, point)


@pytest.mark.parametrize("format_", ["raw", "qcow2"])
def test_in_place_a_guest_is_as_it_was(room: Room, format_: str) -> None:
    uuid = uuid4()
    disk = image(room, name="disk.first")
    now = disk.with_suffix(f".{format_}")
    subprocess.run([need("qemu-img", "qemu-utils"), "convert", "-O", format_, "-f", "raw", disk, now], check=True)
    now.chmod(0o604)
    definition = xml(now, uuid=str(uuid), format=format_, name="as-it-was")
    domain = room.connection.use().defineXML(definition)
    point = room.point(domain.XMLDesc(0), {"vda": disk}, vm_id=uuid, vm_name="as-it-was")
    changed = disk_content()[:1000] + b"changed" * 1000
    _rewrite(now, changed.ljust(len(disk_content()) + CHUNK_BYTES, b"x"), format_)
    room.connection.use().defineXML(definition.replace("64</memory>", "96</memory>"))
    run = room.restored(point, target="in_place")
    assert (run.status, run.error) == ("completed", None)
    assert [content_of(now, format_) == disk_content()] == [True], "and as large as it was"
    assert now.stat().st_mode & 0o777 == 0o604
    found: Any = ElementTree.fromstring(room.connection.use().lookupByUUIDString(str(uuid)).XMLDesc(0))
    assert found.findtext("memory") == str(64 * 1024)
    assert {path.name for path in (room.folder / "images").iterdir()} == {"disk.first", now.name}
    assert room.store.ledgers.owned("run", host="local") == []


UEFI = "<loader readonly='yes' type='pflash'>{code}</loader><nvram>{variables}</nvram></os><features><acpi/></features>"
TPM = "<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>"


def with_uefi(room: Room, definition: str, *, chosen: Path | None = None) -> tuple[str, Path, bytes]:
    """Such a guest, where its variables lie, and some that no other has. `chosen`: by libvirt, whose folder that is."""
    firmware = installed_uefi()
    if firmware is None:
        lacking("needs UEFI firmware: apt-get install ovmf")
    path = room.folder / "images/own_VARS.fd" if chosen is None else chosen / "uefi_VARS.fd"
    path.parent.mkdir(parents=True, exist_ok=True)
    variables = bytearray(Path(firmware.variables).read_bytes())
    variables[-16:] = b"from the backup!"
    path.write_bytes(b"other variables")
    if chosen is not None:
        features = "</os><features><acpi/></features>"
        return definition.replace("<os>", "<os firmware='efi'>").replace("</os>", features), path, bytes(variables)
    return definition.replace("</os>", UEFI.format(code=firmware.code, variables=path)), path, bytes(variables)


@pytest.mark.parametrize("is_chosen", [False, True])
def test_variables_and_tpm_state_come_along(room: Room, data_dir: Path, is_chosen: bool) -> None:
    """`is_chosen`: by libvirt, which then names no file of variables while the guest is off."""
    need("swtpm", "swtpm")
    uuid = uuid4()
    disk = image(room)
    chosen = data_dir / "libvirt/lib/qemu/nvram" if is_chosen else None
    definition, path, variables = with_uefi(room, xml(disk, uuid=str(uuid), name="uefi", more=TPM), chosen=chosen)
    if is_chosen:
        assert "nvram" not in definition
    parts = {"nvram": base64.b64encode(variables).decode(), "tpm": {"tpm2-00.permall": "c3RhdGU="}}
    point = room.point(definition, {"vda": disk}, vm_id=uuid, **parts)
    run = room.restored(point, target="new_domain", name="restored")
    assert run.error is None, run.error
    state = data_dir / f"libvirt/lib/swtpm/{run.id}/tpm2/tpm2-00.permall"
    assert state.read_bytes() == b"state"
    found: Any = ElementTree.fromstring(room.connection.use().lookupByName("restored").XMLDesc(0))
    template = Path(found.find("os/nvram").get("template"))
    assert [template.read_bytes() == variables] == [True]
    assert Path(found.findtext("os/nvram")).name not in (path.name, "restored_VARS.fd"), "another guest's stay another guest's"
    state.unlink()  # what swtpm is given here is no state of its

    room.connection.use().defineXML(definition)
    assert room.restored(point, target="in_place").error is None
    assert [path.read_bytes() == variables] == [True]
    assert (data_dir / f"libvirt/lib/swtpm/{uuid}/tpm2/tpm2-00.permall").read_bytes() == b"state"
    for name in ("restored", "uefi"):
        room.connection.use().lookupByName(name).undefineFlags(NVRAM_TOO)


def test_a_firmware_that_this_host_has_not_is_replaced_by_its_own(room: Room) -> None:
    firmware = installed_uefi()
    if firmware is None:
        lacking("needs UEFI firmware: apt-get install ovmf")
    uefi = "<loader readonly='yes' type='pflash'>/nowhere/CODE.fd</loader></os><features><acpi/></features>"
    definition = xml(image(room)).replace("</os>", uefi)
    point = room.point(definition, {"vda": image(room)})
    run = room.restored(point, target="new_domain", name="own-firmware")
    assert run.error is None, run.error
    domain = room.connection.use().lookupByName("own-firmware")
    assert ElementTree.fromstring(domain.XMLDesc(0)).findtext("os/loader") == firmware.code
    assert any("not CODE.fd" in warning.message for warning in run.warnings)
    domain.undefineFlags(NVRAM_TOO)


def test_a_point_never_runs_a_program_of_its_author(room: Room, tmp_path: Path) -> None:
    """libvirt runs the emulator of a domain to ask what it can do, even where the domain is not started."""
    ran, evil = tmp_path / "ran", tmp_path / "evil.sh"
    evil.write_text(f"#!/bin/sh\ntouch {ran}\n")
    evil.chmod(0o755)
    tmp_path.chmod(0o755)
    more = f"<emulator>{evil}</emulator><serial type='pty'><log file='{tmp_path}/written' append='on'/></serial>"
    disk = image(room)
    point = room.point(xml(disk, more=more), {"vda": disk})
    run = room.restored(point, target="new_domain", name="harmless")
    assert run.error is None, run.error
    written = room.connection.use().lookupByName("harmless").XMLDesc(0)
    assert (ran.exists(), "evil.sh" in written, f"{tmp_path}/written" in written) == (False, False, False)
    assert any(str(evil)[:40] in warning.message for warning in run.warnings)
    room.connection.use().lookupByName("harmless").undefine()


def test_in_place_is_refused_while_the_guest_runs_or_is_gone(room: Room) -> None:
    uuid = uuid4()
    disk = boot_sector(room.folder / "images/disk.raw", WRITES)
    more = {"uuid": str(uuid), "name": "runs"}
    definition = xml(disk, **more).replace("bridge='nobridge0'", "").replace("type='bridge'", "type='user'")
    definition = (
        definition.replace("<source />", "").replace(" cache='none' io='native'", "").replace("file='/nowhere/setup.iso'", "")
    )
    point = room.point(definition, {"vda": disk}, vm_id=uuid)
    request = RestoreRequest(target="in_place")
    with pytest.raises(BackupNotFound, match="any more"):
        room.backups.restore(point.id, request)
    domain = room.connection.use().defineXML(definition)
    domain.create()
    before = disk.read_bytes()[:512]
    with pytest.raises(SourceRunning):
        room.backups.restore(point.id, request)
    domain.destroy()
    assert disk.read_bytes()[:512] == before
    assert room.ended(room.backups.restore(point.id, request)).status == "completed"


def test_in_place_what_fails_leaves_the_guest_as_it_is(room: Room) -> None:
    uuid = uuid4()
    disk = image(room)
    definition = xml(disk, uuid=str(uuid), name="unharmed")
    room.connection.use().defineXML(definition)
    point = room.point(definition, {"vda": disk}, vm_id=uuid)
    image(room, b"now" * 1000)
    _damage(room)
    before = room.connection.use().lookupByUUIDString(str(uuid)).XMLDesc(0)
    run = room.restored(point, target="in_place")
    assert run.error is not None
    assert run.error.code == "E_BAK_DAMAGED"
    assert disk.read_bytes() == b"now" * 1000
    assert room.connection.use().lookupByUUIDString(str(uuid)).XMLDesc(0) == before
    assert [path.name for path in disk.parent.iterdir()] == ["disk.raw"]
    assert room.store.ledgers.owned("run", host="local") == []


def test_in_place_one_disk_leaves_the_other_and_the_definition(room: Room) -> None:
    uuid = uuid4()
    first, second = image(room, name="first.raw"), image(room, disk_content()[:4096], name="second.raw")
    more = f"<disk type='file'><source file='{second}'/><target dev='vdb'/></disk>"
    definition = xml(first, uuid=str(uuid), name="two-disks", more=more)
    room.connection.use().defineXML(definition)
    point = room.point(definition, {"vda": first, "vdb": second}, vm_id=uuid)
    first.write_bytes(b"first")
    second.write_bytes(b"second")
    room.connection.use().defineXML(definition.replace("64</memory>", "96</memory>"))
    assert room.restored(point, target="in_place", disks=("vdb",)).status == "completed"
    assert (first.read_bytes(), second.read_bytes()) == (b"first", disk_content()[:4096])
    found: Any = ElementTree.fromstring(room.connection.use().lookupByUUIDString(str(uuid)).XMLDesc(0))
    assert found.findtext("memory") == str(96 * 1024)
    with pytest.raises(BackupBadRequest):
        room.backups.restore(point.id, RestoreRequest(target="in_place", disks=("vdx",)))


def on_device(room: Room, device: str) -> tuple[str, RestorePoint]:
    """A guest whose disk is that device, and its point; the device is larger than the disk was."""
    uuid = uuid4()
    definition = xml(Path(device), uuid=str(uuid), name=f"on-{uuid}").replace(
        "type='file' device='disk'", "type='block' device='disk'"
    )
    definition = definition.replace(f"file='{device}'", f"dev='{device}'")
    room.connection.use().defineXML(definition)
    return str(uuid), room.point(definition, {"vda": image(room)}, vm_id=uuid)


def test_in_place_a_device_is_written_where_it_is_and_that_is_reported(room: Room) -> None:
    backing = image(room, b"x" * (len(disk_content()) + 65536), name="backing")
    with loop_device(backing) as device:
        _, point = on_device(room, device)
        run = room.restored(point, target="in_place")
        assert (run.status, run.error) == ("completed", None)
        assert "E_BAK_NO_WAY_BACK" in {warning.code for warning in run.warnings}
        assert [Path(device).read_bytes() == disk_content() + bytes(65536)] == [True], "and its rest is zeros"
    small = image(room, bytes(65536), name="small")
    with loop_device(small) as device:
        _, point = on_device(room, device)
        with pytest.raises(BackupConflict, match="65536"):
            room.backups.restore(point.id, RestoreRequest(target="in_place"))


@pytest.mark.parametrize("damaged", [False, True])
def test_in_place_a_zfs_volume_is_rolled_back_where_the_restore_fails(
    room: Room, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """The order of it; real zfs is asked in the lab guest."""
    before = b"x" * (len(disk_content()) + 65536)
    commands: list[str] = []
    with loop_device(image(room, before, name="backing")) as device:

        def zfs(*arguments: str) -> str:
            commands.append(arguments[0])
            assert arguments[1].startswith("tank/volume@synvirt-restore-")
            if arguments[0] == "snapshot":
                assert [Path(device).read_bytes() == before] == [True]
            if arguments[0] == "rollback":
                Path(device).write_bytes(before)
            return ""

        as_a_volume(monkeypatch, zfs)
        _, point = on_device(room, device)
        if damaged:
            _damage(room)
        run = room.restored(point, target="in_place")
        assert "E_BAK_NO_WAY_BACK" not in {warning.code for warning in run.warnings}
        assert run.status == ("failed" if damaged else "completed")
        assert commands == (["snapshot", "rollback", "destroy"] if damaged else ["snapshot", "destroy"])
        assert [Path(device).read_bytes() == (before if damaged else disk_content() + bytes(65536))] == [True]


def test_boot_tests_see_who_boots_and_who_does_not_and_leave_nothing(room: Room) -> None:
    """Two at once."""
    disk = boot_sector(room.folder / "images/disk.raw", WRITES)
    before = disk.read_bytes()
    good = room.point(xml(disk), {"vda": disk})
    bad = room.point(xml(disk), {"vda": image(room, bytes(CHUNK_BYTES), name="empty.raw")})
    begun = [room.backups.boot_test(point.id) for point in (good, bad)]
    booted, failed = (room.ended(run) for run in begun)
    assert (booted.status, booted.error) == ("completed", None)
    found = room.backups.points.get(good.id).boot_test
    assert found is not None
    assert (found.result, found.sign, found.screenshot) == ("booted", "activity", True)
    assert (room.backups.screenshot(good.id) or b"").startswith(b"\x89PNG")
    assert disk.read_bytes() == before

    assert failed.error is not None
    assert failed.error.code == "E_BAK_BOOT_TEST_FAILED"
    found = room.backups.points.get(bad.id).boot_test
    assert found is not None
    assert found.result == "failed"
    assert "nothing to boot from" in (found.trouble or "")
    for run, point in ((booted, good), (failed, bad)):
        _nothing_of_the_test(room, run.id, point)
    assert {path.name for path in room.restore_host.screens.iterdir()} == {f"{good.id}.png", f"{bad.id}.png"}


def test_a_boot_test_without_room_says_nothing_of_its_point(room: Room) -> None:
    need_root("mount")
    disk = boot_sector(room.folder / "images/disk.raw", FILLS, size=64 * MIB)
    point = room.point(xml(disk), {"vda": disk})
    scratch = room.scratch()
    scratch.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2M,mode=711", "tmpfs", scratch], check=True)
    try:
        run = room.ended(room.backups.boot_test(point.id))
        assert run.error is not None
        assert run.error.code == "E_BAK_HOST_LACKS"
        assert f"what it writes has no room in the file system at {scratch.resolve()}" in run.error.message
        assert "free space" in (run.error.hint or "")
        assert room.backups.points.get(point.id).boot_test is None
        _nothing_of_the_test(room, run.id, point)
        subprocess.run(["mount", "-o", "remount,size=64M", scratch], check=True)
        run = room.ended(room.backups.boot_test(point.id))
        assert (run.status, run.error) == ("completed", None)
    finally:
        subprocess.run(["umount", "--lazy", scratch], check=True)


def test_a_service_that_was_killed_leaves_nothing_either(room: Room) -> None:
    """What a kill leaves is what it noted: here each thing is made, and nobody is there to undo it."""
    run_id = uuid4()
    restore_host, ledger = room.restore_host, room.backups._restoring.ledger
    disk = boot_sector(room.folder / "images/disk.raw", WRITES)
    definition = xml(disk).replace("<source bridge='nobridge0'/>", "").replace(" cache='none' io='native'", "")
    point = room.point(definition, {"vda": disk})
    domain = restoring_domain.foreign(definition)
    restoring_domain.renewed(domain, name="restored", run_id=run_id, mac=lambda number: own_mac(run_id, str(number)))
    console = room.host.console_log(run_id)
    console.parent.mkdir(parents=True, exist_ok=True)  # a guest of an earlier test may have been the first, or none
    restoring_domain.isolated(domain, serial_log=str(console))
    restoring_domain.with_disks(domain, {"vda": restoring_domain.Place(str(disk))}, wanted=frozenset({"vda"}))
    volume = restore_host.default()[1].volume_name(run_id, "vda")
    ledger.record(run_id, "volume", f"directory {volume}")
    restore_host.default()[1].create(volume, CHUNK_BYTES)
    scratch = room.scratch() / str(run_id)
    ledger.record(run_id, "scratch", str(scratch))
    scratch.mkdir(parents=True)
    ledger.record(run_id, "folder", str(room.folder / "exports" / f".{run_id}.partial"))
    (room.folder / "exports" / f".{run_id}.partial").mkdir(parents=True)
    ledger.record(run_id, "domain", str(run_id))
    started = room.connection.use().defineXML(domain.xml)
    started.create()
    assert started.isActive()
    room.backups.close()
    room.backups = room.service()
    room.backups.start()
    nothing_left(room, point)
    assert not scratch.exists()
    assert list((room.folder / "exports").iterdir()) == []


def _nothing_of_the_test(room: Room, run_id: UUID, point: RestorePoint) -> None:
    nothing_left(room, point)
    assert f"boot-test-{run_id}" not in room.names()
    assert not (room.scratch() / str(run_id)).exists()
    processes = subprocess.run(["pgrep", "-f", str(run_id)], capture_output=True, text=True).stdout.split()
    assert [pid for pid in processes if pid != str(os.getpid())] == []


def _damage(room: Room) -> None:
    """A byte of each pack's first frame."""
    for pack in (room.folder / "repository/packs").rglob("*.pack"):
        content = bytearray(pack.read_bytes())
        content[100] ^= 1
        pack.write_bytes(content)


def _rewrite(path: Path, content: bytes, format_: str) -> None:
    raw = path.with_suffix(".new")
    raw.write_bytes(content)
    mode = path.stat().st_mode
    subprocess.run(["qemu-img", "convert", "-f", "raw", "-O", format_, raw, path], check=True)
    path.chmod(mode)
    raw.unlink()
