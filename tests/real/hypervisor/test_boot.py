"""Guests that come up in odd ways and guests that do not, on real QEMU: what is seen of each, and what is said about it."""

import struct
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest

from synvirt.errors import GuestBootFailed, GuestHasNoRoom
from synvirt.hypervisor import Paused, Volume, boot
from synvirt.hypervisor.libvirt_host import LibvirtHost
from synvirt.migrations.landing import machine_of
from synvirt.model.job import Migration
from synvirt.model.machine import Disk, GuestOs, VmManifest
from synvirt.sample import disk as sample_disk
from synvirt.sample import pieces
from synvirt.settings import Settings
from synvirt.sizes import MIB
from tests.contracts.hypervisors import job, never
from tests.needs import need, need_root
from tests.real.guests import FILLS, RESETS, WRITES, boot_sector, kernel, prints

# Emulated, on a busy machine. A test that needs all of it has failed.
PATIENCE_S = 120.0


@pytest.fixture
def host(data_dir: Path, host: LibvirtHost) -> Iterator[LibvirtHost]:
    quick = LibvirtHost(Settings(data_dir=data_dir).hypervisor_uri, data_dir, boot_activity_s=6)
    yield quick
    quick.close()


def started(
    host: LibvirtHost, image: Path, *, firmware: str = "bios", family: str = "other", tpm: bool = False, memory_mib: int = 64
) -> Migration:
    memory = 256 if firmware == "uefi" else memory_mib
    manifest = VmManifest(
        vm_id="x",
        name=f"guest {image.parent.name} {image.stem}",
        disks=(Disk(key="disk1", label="disk1", capacity_bytes=image.stat().st_size),),
        firmware=firmware,
        tpm=tpm,
        guest_os=GuestOs(family=family),
        memory_bytes=memory * MIB,
    )
    migration = job(manifest)
    domain = host.domain_xml(machine_of(migration), [Volume("disk1", str(image), "file")])
    host.define(domain)
    host.start(UUID(domain.uuid))
    return migration


def fails(host: LibvirtHost, migration: Migration, timeout_s: float = PATIENCE_S) -> GuestBootFailed:
    began = time.monotonic()
    with pytest.raises(GuestBootFailed) as caught:
        host.wait_until_booted(migration.id, timeout_s, never)
    assert time.monotonic() - began < PATIENCE_S, "it was seen before the time was over"
    host.undefine(migration.id, migration.id)
    return caught.value


def picture_size(png: bytes | None) -> tuple[int, int]:
    """Of a PNG (RFC 2083) that is whole: its chunks' checksums are right to the end."""
    assert png is not None
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    at, kinds = 8, []
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        assert zlib.crc32(png[at + 4 : at + 8 + length]) == struct.unpack_from(">I", png, at + 8 + length)[0]
        kinds.append(kind)
        at += 12 + length
    assert (kinds[0], kinds[-1]) == (b"IHDR", b"IEND")
    return struct.unpack_from(">II", png, 16)


def test_an_empty_disk_is_no_boot_device_and_no_other_bus_helps(host: LibvirtHost, tmp_path: Path) -> None:
    (image := tmp_path / "empty.raw").write_bytes(bytes(MIB))
    migration = started(host, image)
    error = fails(host, migration)
    assert "nothing to boot from" in error.summary
    assert "No bootable device" in error.detail
    assert "boot disk" in str(error.hint)
    assert not error.other_bus_may_help
    assert picture_size(host.screenshot(migration.id)) == (720, 400)
    host.forget_screenshot(migration.id)
    assert host.screenshot(migration.id) is None


def test_a_guest_whose_disk_has_no_room_is_not_one_that_does_not_boot(host: LibvirtHost, tmp_path: Path) -> None:
    """And when there is room, it goes on by itself once it is resumed."""
    need_root("mount")
    small = tmp_path / "small"
    small.mkdir(mode=0o711)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=711", "tmpfs", small], check=True)
    try:
        migration = started(host, boot_sector(small / "fills.raw", FILLS, size=64 * MIB))
        with pytest.raises(GuestHasNoRoom) as caught:
            host.wait_until_booted(migration.id, PATIENCE_S, never)
        assert caught.value.summary.endswith(f"what it writes has no room in the file system at {small} (fills.raw)")
        assert not caught.value.other_bus_may_help
        assert host.resume(migration.id) == Paused(f"the file system at {small} (fills.raw)")
        subprocess.run(["mount", "-o", "remount,size=64M", small], check=True)
        host.resume(migration.id)
        assert host.wait_until_booted(migration.id, PATIENCE_S, never) == "activity"
        host.undefine(migration.id, migration.id)
    finally:
        subprocess.run(["umount", "--lazy", small], check=True)


def test_a_reset_loop_is_seen(host: LibvirtHost, tmp_path: Path) -> None:
    error = fails(host, started(host, boot_sector(tmp_path / "resets.raw", RESETS)))
    assert "restarts again and again" in error.summary
    assert error.other_bus_may_help


@pytest.mark.parametrize(
    ("family", "shows", "cause"),
    [
        ("linux", "error: no such device: 5b1f.\nEntering rescue mode...\ngrub rescue> ", "GRUB rescue"),
        ("windows", "*** STOP: 0x0000007B (0xF78D2524,0xC0000034,0x00000000,0x00000000)", "0x7B"),
        ("windows", "BOOTMGR is missing\nPress Ctrl+Alt+Del to restart\n", "Windows boot loader"),
    ],
)
def test_what_a_guest_shows_is_read(host: LibvirtHost, tmp_path: Path, family: str, shows: str, cause: str) -> None:
    """A Windows guest's firmware does not speak on the serial console: all there is, is the screen."""
    error = fails(host, started(host, boot_sector(tmp_path / "says.raw", prints(shows)), family=family))
    assert cause in error.summary
    assert shows.splitlines()[0].rstrip() in error.detail
    assert ("its console ends" in error.detail) == (family == "linux")
    assert "its screen ends" in error.detail


def test_a_guest_that_only_writes_has_booted(host: LibvirtHost, tmp_path: Path) -> None:
    image = boot_sector(tmp_path / "writes.raw", WRITES)
    migration = started(host, image)
    assert host.wait_until_booted(migration.id, PATIENCE_S, never) == "activity"
    assert image.read_bytes()[512:1024] == image.read_bytes()[:512], "it wrote its own sector to the next one"
    host.undefine(migration.id, migration.id)


def test_a_guest_that_hangs_is_seen_when_its_time_is_over(host: LibvirtHost, tmp_path: Path) -> None:
    error = fails(host, started(host, boot_sector(tmp_path / "hangs.raw", prints("starting...\n"))), timeout_s=12)
    assert "no sign of life within 12 s" in error.summary
    assert error.other_bus_may_help


@pytest.mark.timeout(240)
def test_a_uefi_guest_without_a_loader_ends_in_the_shell(host: LibvirtHost, tmp_path: Path) -> None:
    (image := tmp_path / "empty.raw").write_bytes(bytes(MIB))
    migration = started(host, image, firmware="uefi")
    error = fails(host, migration)
    assert "no boot loader on the disks" in error.summary
    assert "BOOTX64.EFI" in str(error.hint)
    assert not error.other_bus_may_help
    width, height = picture_size(host.screenshot(migration.id))
    assert width >= 640
    assert height >= 400


@pytest.mark.timeout(240)
@pytest.mark.parametrize("firmware", ["bios", "uefi"])
def test_a_tpm_is_there_and_goes_with_its_domain(host: LibvirtHost, data_dir: Path, tmp_path: Path, firmware: str) -> None:
    migration = started(host, boot_sector(tmp_path / "x.raw", prints("here\n")), firmware=firmware, tpm=True)
    state = data_dir / "libvirt/lib/swtpm" / str(migration.id) / "tpm2"
    assert (state / "tpm2-00.permall").stat().st_size > 0, "swtpm_setup made its keys"
    running = subprocess.run(["pgrep", "-f", f"swtpm socket.*{migration.id}"], capture_output=True, text=True)
    assert running.stdout.strip(), "and swtpm runs"
    assert migration.manifest is not None
    host.undefine(migration.id, migration.id)
    assert not state.parent.exists()
    gone(lambda: subprocess.run(["pgrep", "-f", f"swtpm socket.*{migration.id}"], capture_output=True).returncode == 1)


def gone(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("where", ["console", "screen"])
def test_a_kernel_that_panics_is_read_wherever_it_says_so(
    host: LibvirtHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Without its initramfs a kernel has no root file system. Most imported guests have no serial console: a screen is all."""
    for program, package in (("syslinux", "syslinux"), ("mcopy", "mtools"), ("mke2fs", "e2fsprogs")):
        need(program, package)
    line = f"{'console=ttyS0' if where == 'console' else 'console=tty0'} {sample_disk.EMULATED}"
    config = sample_disk.SYSLINUX_CONFIG.replace("SERIAL 0 115200\n", "").replace("  INITRD initrd.gz\n", "")
    monkeypatch.setattr(sample_disk, "SYSLINUX_CONFIG", f"{config.split('  APPEND')[0]}  APPEND {line}\n")
    if where == "screen":  # the cloud kernel has no text screen
        whole = kernel(pieces.cache_dir())
        monkeypatch.setattr(pieces, "_kernel", lambda _: whole)
    image = tmp_path / "panics.raw"
    (tmp_path / "work").mkdir()
    sample_disk.make_disk(image, pieces.gather(pieces.cache_dir()), sample_id="none", payload_bytes=0, work=tmp_path / "work")
    # It has said all, and its processor is busy for as long as one looks.
    monkeypatch.setattr(boot, "QUIET_S", 2.0)
    error = fails(host, started(host, image, family="linux", memory_mib=256))
    assert "does not find its root file system" in error.summary
    assert "Unable to mount root fs" in error.detail
    assert error.other_bus_may_help
