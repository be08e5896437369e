"""What virt-v2v needs on a machine without a kernel of its own: one for libguestfs' appliance, made once and kept."""

import fcntl
import os
import shutil
from pathlib import Path

import pytest

from synvirt.guests.virt_v2v import TRANSLATED
from synvirt.model.machine import Disk, GuestOs, VmManifest
from synvirt.programs import run
from synvirt.sample.disk import EMULATED
from synvirt.sample.pieces import cache_dir, gather, lean
from tests.needs import need, need_root

MIB = 1 << 20
# Of modules as they are made here now: those of before are made again.
WHOLE = "whole-and-lean"
# Without ACPI the appliance's kernel finds fewer devices, and udev looks at each of them. One process of udev does that: to
# fork more of them takes QEMU longer than they save on one processor.
FEW_DEVICES = "acpi=off udev.children_max=1"
NAME = "7e57ab1e-0000-4000-8000-000000000001"


def KVM() -> bool:  # noqa: N802
    return False


def need_conversions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The packages, and the environment that an administrator of a host without a kernel in /boot would set."""
    need("virt-v2v-in-place", "virt-v2v")
    need("mkntfs", "ntfs-3g")
    need("hivexregedit", "libwin-hivex-perl")
    need("genisoimage", "genisoimage")
    need("depmod", "kmod")
    need_root("a file system by FUSE, and /lib/modules")
    # supermin copies it, and fails where it is not there; a machine without a kernel of its own has none.
    Path("/lib/modules").mkdir(exist_ok=True)
    for key, value in _environment(cache_dir() / "libguestfs").items():
        monkeypatch.setenv(key, value)


def _environment(folder: Path) -> dict[str, str]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pieces = gather(cache_dir())
        version = pieces.kernel_version
        modules = folder / version / "lib" / "modules" / version
        if not (folder / version / WHOLE).exists():
            shutil.rmtree(folder / version, ignore_errors=True)
            source = pieces.kernel.parent.parent / "lib" / "modules" / version
            shutil.copytree(source, modules, symlinks=True, ignore=shutil.ignore_patterns("build", "source"))
            for module in modules.rglob("*.ko"):
                module.write_bytes(lean(module.read_bytes()))
            run(["depmod", "-b", str(folder / version), version], timeout_s=120)
            (folder / version / WHOLE).touch()
    return {
        "SUPERMIN_KERNEL": os.fspath(pieces.kernel),
        "SUPERMIN_KERNEL_VERSION": version,
        "SUPERMIN_MODULES": os.fspath(modules),
        "LIBGUESTFS_CACHEDIR": os.fspath(folder),
        "LIBGUESTFS_MEMSIZE": "768",
        # Its programs are where they were before: QEMU has their code translated already, which saves a third.
        "LIBGUESTFS_APPEND": f"{TRANSLATED['LIBGUESTFS_APPEND']} {EMULATED} {FEW_DEVICES}",
    }


LINUX = GuestOs(family="linux", id="debian12_64Guest", name="Debian GNU/Linux 12")


def manifest(guest: GuestOs | None = None) -> VmManifest:
    """Of a Windows; or of that guest."""
    return VmManifest(
        vm_id="phony",
        name="phony",
        power_state="off",
        firmware="bios",
        cpu_count=1,
        memory_bytes=1024 * MIB,
        guest_os=guest or GuestOs(family="windows", id="windows2019srvNext-64", name="Windows Server 2022"),
        disks=(Disk(key="disk-0", label="disk-0", capacity_bytes=182 * MIB, format="raw", bus="sata"),),
    )
