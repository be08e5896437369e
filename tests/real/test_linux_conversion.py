"""Drivers put into a Linux guest's initramfs by the real virt-v2v-in-place, as a plan with `conversion: always` asks for."""

import shutil
from pathlib import Path

import pytest

from synvirt.guests.virt_v2v import VirtV2vInPlace
from synvirt.sample.pieces import cache_dir, gather
from tests.guests import phony_linux
from tests.guests.conversions import KVM, LINUX, NAME, manifest, need_conversions

pytestmark = pytest.mark.timeout(900)


def test_a_linux_guest_is_converted_and_of_two_systems_that_of_its_boot_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_conversions(monkeypatch)
    disk = phony_linux.disk(tmp_path / "linux.raw", tmp_path, gather(cache_dir()))
    disks = [str(disk), str(shutil.copyfile(disk, tmp_path / "second.raw"))]
    preparer = VirtV2vInPlace(tmp_path / "conversions", tmp_path / "no-drivers.iso", tmp_path / "no-tools", kvm=KVM)
    guest = manifest(LINUX)
    messages: list[str] = []
    preparer.convert(NAME, guest, disks, lambda kind, text: messages.append(f"{kind}: {text}"), lambda: False)
    assert phony_linux.read(disk, "etc/fstab").startswith("/dev/sda1"), "the volume is only read"
    preparer.adopt(NAME, disks)
    preparer.discard(NAME)
    assert phony_linux.read(disk, phony_linux.INITRAMFS).split() == ["-c", "-k", phony_linux.VERSION], messages
    assert phony_linux.read(disk, "etc/fstab").startswith("/dev/vda1"), messages
    assert "virtio_blk" in phony_linux.read(disk, "etc/initramfs-tools/modules").split(), messages
    assert phony_linux.read(Path(disks[1]), "etc/fstab").startswith("/dev/sda1")
