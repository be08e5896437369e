"""Whether guests can run here: libvirt, QEMU, firmware, networks; and what Windows needs to boot on them."""

import os
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from synvirt.doctor.finding import Missing, program_path
from synvirt.hypervisor.accel import EMULATOR, accelerator
from synvirt.kvm import qemu_user
from synvirt.kvm.connection import Connection
from synvirt.kvm.qemu_user import embedded_root
from synvirt.settings import Settings

# virNetwork's flag VIR_CONNECT_LIST_NETWORKS_ACTIVE, known without the library.
_ACTIVE = 2
# Where distributions have libraries: Fedora's lib64, Debian's lib/x86_64-linux-gnu. /usr/lib is too large to be searched whole.
_LIBRARIES = ("lib*", "lib*/*")


def libvirt_version() -> str:
    """The version of libvirt's library. Missing, ImportError."""
    from synvirt.kvm.library import module

    number = int(module().getVersion())
    return f"libvirt {number // 1_000_000}.{number // 1000 % 1000}.{number % 1000}"


def is_system(settings: Settings) -> bool:
    return settings.hypervisor_uri.startswith("qemu:///system")


def hypervisor(settings: Settings) -> str:
    """The embedded driver is only looked for: a service that runs has it open, and a second may not."""
    if embedded_root(settings.hypervisor_uri) is None:
        connection = Connection(settings.hypervisor_uri, lambda: None)
        try:
            connection.use()
        finally:
            connection.close()
        return settings.hypervisor_uri
    drivers = (Path("/usr").glob(f"{libraries}/libvirt/connection-driver/libvirt_driver_qemu.so") for libraries in _LIBRARIES)
    driver = next(chain.from_iterable(drivers), None)
    if driver is None:
        raise Missing("libvirt's QEMU driver is not installed")
    return f"{settings.hypervisor_uri}: {driver}"


def guests_user(settings: Settings) -> str:
    """The user that guests run as, and why. Missing where it is root because access is missing."""
    found = qemu_user.choose(settings)
    if found.lacking:
        raise Missing(found.why)
    return found.why


def kvm(settings: Settings) -> str:
    """Whether KVM works, shown by a guest. Missing."""
    program_path(EMULATOR)  # else the guest's failure would say nothing of KVM
    found = accelerator(settings.data_dir / "libvirt" if settings.data_dir.is_dir() else None)
    if found.kind != "kvm":
        raise Missing(f"{found.reason}; guests are emulated, slowly")
    return found.reason


def uefi(*, secure: bool) -> Callable[[Settings], str]:
    """A check for UEFI firmware; `secure`: with Secure Boot and enrolled keys."""

    def look(_: Settings) -> str:
        from synvirt.hypervisor.libvirt_host import installed_uefi

        if (firmware := installed_uefi(secure=secure)) is None:
            raise Missing("no UEFI firmware with secure boot and enrolled keys" if secure else "no UEFI firmware for guests")
        return firmware.code

    return look


def network(settings: Settings) -> str:
    """What a network card is plugged into that the plan maps nowhere."""
    if not is_system(settings):
        return "user: the emulator's own, which needs nothing of the host"
    connection = Connection(settings.hypervisor_uri, lambda: None)
    try:
        active = {network.name() for network in connection.use().listAllNetworks(_ACTIVE)}
    finally:
        connection.close()
    if "default" not in active:
        raise Missing(f"libvirt has no active network default; it has {', '.join(sorted(active)) or 'none'}")
    return "network:default"


def rehearsed_network(_: Settings) -> str:
    """Whether rehearsals may have a network, shown by one. Missing."""
    from synvirt.errors import HostLacks
    from synvirt.rehearsals.network import Bubble

    try:
        Bubble(()).close()
    except HostLacks as error:
        raise Missing(error.detail) from error
    return "a namespace with a tap device"


def virtio_win(settings: Settings) -> str:
    """Where the driver image lies. Missing."""
    if not os.access(settings.virtio_win_iso, os.R_OK):
        raise Missing(f"no {settings.virtio_win_iso}")
    return str(settings.virtio_win_iso)


def rhsrvany(settings: Settings) -> str:
    """Where the program lies that installs agents in Windows. Missing."""
    from synvirt.guests.virt_v2v import SERVICE_STARTERS

    found = [name for name in SERVICE_STARTERS if (settings.virt_tools_dir / name).exists()]
    if not found:
        raise Missing(f"none of {', '.join(SERVICE_STARTERS)} in {settings.virt_tools_dir}")
    return str(settings.virt_tools_dir / found[0])
