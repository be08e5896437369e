"""Every key of a VM's configuration, and how it is handled. No I/O.

The keys are those of `PUT /nodes/{node}/qemu/{vmid}/config` (pve-docs 9.1.3); `[n]` stands for a number. Tests compare this
table with the vendor's schema, so that each key is read, or named in a concern, or left out for a reason given here.
"""

import re
from collections.abc import Iterable
from typing import Final

IN_MANIFEST: Final = frozenset(
    (
        *(
            "name",
            "bios",
            "cores",
            "sockets",
            "smp",
            "vcpus",
            "memory",
            "ostype",
            "agent",
            "boot",
            "bootdisk",
            "scsihw",
            "smbios1",
        ),
        *("efidisk0", "tpmstate0", "ide[n]", "sata[n]", "scsi[n]", "virtio[n]", "net[n]"),
    )
)
# Keys with a concern of their own (concerns.py).
WITH_CONCERN: Final = frozenset(
    (
        *("args", "hostpci[n]", "usb[n]", "virtiofs[n]", "unused[n]", "lock", "template", "cpu", "balloon", "arch"),
        *("amd-sev", "intel-tdx", "hookscript"),
    )
)
# Named together: hardware or limits that the VM does not have here unless an operator adds them.
NOT_TAKEN_OVER: Final = frozenset(
    (
        *("numa", "numa[n]", "hugepages", "keephugepages", "affinity", "cpulimit", "cpuunits", "shares", "machine", "vga"),
        *("audio0", "rng0", "serial[n]", "parallel[n]", "watchdog", "ivshmem", "localtime", "startdate", "kvm", "startup"),
    )
)
# Keys without meaning for a machine that runs elsewhere, and the reason.
OF_NO_ACCOUNT: Final = {
    "acpi, hotplug, tablet, keyboard, spice_enhancements, tdf, allow-ksm": "how the old host runs or shows it",
    "autostart, onboot, freeze, reboot, protection, vmstatestorage": "when the old host starts it; onboot goes off at the end",
    "description, tags": "notes of people there",
    "vmgenid": "a machine on a new host gets a new one, as it must",
    "migrate_downtime, migrate_speed": "migrations there",
    "cicustom, cipassword, citype, ciupgrade, ciuser, ipconfig[n], nameserver, searchdomain, sshkeys": "cloud-init has run",
    "cdrom": "media are not copied",
    # Beside a VM's own: keys of GET's answer, of snapshots, and of requests only.
    "digest, meta, parent, snaptime, snapstate, vmstate, runningmachine, runningcpu, running-nets-host-mtu": "no hardware",
    "background_delay, delete, force, import-working-storage, node, revert, skiplock, vmid": "of the request",
}

_NO_ACCOUNT: Final = frozenset(key for keys in OF_NO_ACCOUNT for key in keys.split(", "))
_ALL: Final = IN_MANIFEST | WITH_CONCERN | NOT_TAKEN_OVER | _NO_ACCOUNT


def kind(key: str) -> str:
    """`scsi0` is one of `scsi[n]`; `audio0` is itself."""
    return key if key in _ALL else re.sub(r"[0-9]+$", "[n]", key)


def not_taken_over(keys: Iterable[str]) -> list[str]:
    return sorted(key for key in keys if kind(key) in NOT_TAKEN_OVER)


def unknown(keys: Iterable[str]) -> list[str]:
    """Keys of a version that is newer than this table."""
    return sorted(key for key in keys if kind(key) not in _ALL)
