"""What this host has of what the service can use: one row a requirement of the specification (part 1) and of our own.

A row looks for one thing, and never changes anything. What the settings do not ask for may be missing without harm.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from synvirt.errors import SynvirtError
from synvirt.hypervisor.accel import EMULATOR, accelerator
from synvirt.hypervisor.connection import Connection, embedded_root
from synvirt.model import GIB
from synvirt.offline.vmcx_tool import vmcx_tool
from synvirt.programs import find, run
from synvirt.settings import Settings

# A tool that says its version takes no time; one that hangs is as good as missing.
LOOK_TIMEOUT_S = 20


class Missing(Exception):
    """Its text: what was looked for, and where."""


@dataclass(frozen=True, slots=True)
class Check:
    """`look`: what was found, in a few words, or Missing. `needed`: does the service as it is set fail without it?"""

    name: str
    what_for: str
    how_to_get: str
    look: Callable[[Settings], str]
    needed: Callable[[Settings], bool] = lambda _: False


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    found: bool
    needed: bool
    detail: str
    what_for: str
    how_to_get: str


def examine(settings: Settings) -> list[Finding]:
    """All checks, in the table's order; none stops another."""
    return [_examine(check, settings) for check in CHECKS]


def _examine(check: Check, settings: Settings) -> Finding:
    try:
        found, detail = True, check.look(settings)
    except Missing as missing:
        found, detail = False, str(missing)
    except SynvirtError as error:
        found, detail = False, error.detail
    return Finding(check.name, found, check.needed(settings), detail, check.what_for, check.how_to_get)


def needs_met(findings: list[Finding]) -> bool:
    return all(finding.found or not finding.needed for finding in findings)


# ── what is looked for ───────────────────────────────────────────────────────────────────────────────────────────────


def _program(name: str, *version: str) -> Callable[[Settings], str]:
    def look(_: Settings) -> str:
        path = _path(name)
        return f"{path}: {_first_line([name, *version])}" if version else path

    return look


def _path(name: str) -> str:
    path = find(name)
    if path is None:
        raise Missing(f"no program {name}")
    return path


def _first_line(argv: list[str]) -> str:
    return next(iter(run(argv, timeout_s=LOOK_TIMEOUT_S).stdout.splitlines()), "")[:80]


def _module(name: str, version: Callable[[], str]) -> Callable[[Settings], str]:
    def look(_: Settings) -> str:
        try:
            return version()
        except ImportError as error:
            raise Missing(f"Python has no module {name}") from error

    return look


def _libvirt_version() -> str:
    import libvirt

    number = int(libvirt.getVersion())
    return f"libvirt {number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def _libnbd_version() -> str:
    import nbd

    return f"libnbd {nbd.NBD().get_version()}"


def _zfs_pool(settings: Settings) -> str:
    _path("zfs")
    if not settings.zfs_pool:
        raise Missing("no pool is set")
    health = _first_line(["zpool", "list", "-H", "-o", "health,free", settings.zfs_pool])
    return f"{settings.zfs_pool}: {' free '.join(health.split())}"


def _hyperv(settings: Settings) -> str:
    command, driver = settings.vmcx_tool, settings.vmcx_tool_driver
    _path(command)
    if settings.vmcx_way != "tool" and not vmcx_tool(settings).has_driver():
        raise Missing(f"{command} is here, but lists no input driver {driver}")
    return f"{command} -i {driver}"


def _virtio_win(settings: Settings) -> str:
    if not os.access(settings.virtio_win_iso, os.R_OK):
        raise Missing(f"no {settings.virtio_win_iso}")
    return str(settings.virtio_win_iso)


def _uefi(_: Settings) -> str:
    from synvirt.hypervisor.libvirt_host import installed_uefi

    if (firmware := installed_uefi()) is None:
        raise Missing("no UEFI firmware for guests")
    return firmware.code


def _kvm(settings: Settings) -> str:
    found = accelerator(settings.data_dir / "libvirt" if settings.data_dir.is_dir() else None)
    if found.kind != "kvm":
        raise Missing(f"{found.reason}; guests are emulated, slowly")
    return found.reason


def _hypervisor(settings: Settings) -> str:
    """The embedded driver is only looked for: a service that runs has it open, and a second may not."""
    if embedded_root(settings.hypervisor_uri) is None:
        connection = Connection(settings.hypervisor_uri, lambda: None)
        try:
            connection.use()
        finally:
            connection.close()
        return settings.hypervisor_uri
    driver = next(Path("/usr").glob("lib*/**/libvirt/connection-driver/libvirt_driver_qemu.so"), None)
    if driver is None:
        raise Missing("libvirt's QEMU driver is not installed")
    return f"{settings.hypervisor_uri}: {driver}"


def _data_dir(settings: Settings) -> str:
    folder = settings.data_dir
    # Where it is to be made, the folder above it decides.
    present = next(path for path in (folder, *folder.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=present):
            pass
    except OSError as error:
        raise Missing(f"{present} cannot be written: {error.strerror}") from error
    return f"{folder}: {shutil.disk_usage(present).free / GIB:.0f} GiB free"


def _always(_: Settings) -> bool:
    return True


def _zfs_is_set(settings: Settings) -> bool:
    return settings.destination == "zfs" or bool(settings.zfs_pool)


_DRIVERS = "https://fedorapeople.org/groups/virt/virtio-win/direct-downloads/stable-virtio/virtio-win.iso"
_WINDOWS = "Windows guests: their virtio drivers"

CHECKS = (
    Check("data_dir", "all that the service keeps", "make it, and give it to the service's user", _data_dir, _always),
    Check(
        "python3-libvirt", "the hypervisor", "apt-get install python3-libvirt", _module("libvirt", _libvirt_version), _always
    ),
    Check("libvirt", "the hypervisor", "apt-get install libvirt-daemon; setting libvirt_uri", _hypervisor, _always),
    Check(EMULATOR, "runs the guests", "apt-get install qemu-system-x86", _program(EMULATOR, "--version"), _always),
    Check("kvm", "guests at full speed", "enable virtualisation in the host's firmware, or nesting where it is a guest", _kvm),
    Check("ovmf", "guests with UEFI firmware", "apt-get install ovmf", _uefi),
    Check("swtpm", "guests with a TPM", "apt-get install swtpm swtpm-tools", _program("swtpm_setup")),
    Check("qemu-img", "disk images of every sort", "apt-get install qemu-utils", _program("qemu-img", "--version"), _always),
    Check(
        "qemu-nbd", "images our own readers refuse", "apt-get install qemu-utils", _program("qemu-nbd", "--version"), _always
    ),
    Check("python3-libnbd", "reading over NBD", "apt-get install python3-libnbd", _module("nbd", _libnbd_version), _always),
    Check("zfs", "volumes on zfs", "apt-get install zfsutils-linux (contrib)", _program("zfs", "version"), _zfs_is_set),
    Check("zfs pool", "volumes on zfs", "zpool create; settings zfs_pool, zfs_namespace", _zfs_pool, _zfs_is_set),
    Check("blkdiscard", "zeros that take no room on zfs", "apt-get install util-linux", _program("blkdiscard"), _zfs_is_set),
    Check("virt-v2v-in-place", _WINDOWS, "apt-get install virt-v2v", _program("virt-v2v-in-place", "--version")),
    Check("virtio-win.iso", _WINDOWS, f"{_DRIVERS}, put where the setting virtio_win_iso says", _virtio_win),
    Check(
        "virt-v2v hyperv",
        "Hyper-V exports by an outside tool, where our own readers are not to read them",
        "a virt-v2v with the input driver hyperv (Debian's has none), or settings vmcx_tool and vmcx_way",
        _hyperv,
        lambda settings: settings.vmcx_way == "tool",
    ),
)
