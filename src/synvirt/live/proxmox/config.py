"""A VM's configuration in Proxmox VE's form: keys, property strings, sizes. No I/O; its input comes from outside.

scsi0: local-lvm:vm-100-disk-0,iothread=1,size=32G        net0: virtio=BC:24:11:00:00:01,bridge=vmbr0,tag=7
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import unquote

from synvirt.machines import card_names
from synvirt.machines.disk_names import disk_serial
from synvirt.model.machine import Chipset, DiskBus, chipset_named
from synvirt.sizes import GIB, KIB, MIB, TIB

# Proxmox VE's limits for each (PVE::QemuServer::Drive, ::Network): more are not looked for.
BUSES: Final[Mapping[str, DiskBus]] = {"scsi": "scsi", "virtio": "virtio", "sata": "sata", "ide": "ide"}
DRIVE: Final = re.compile(r"(scsi|virtio|sata|ide)([0-9]{1,2})")
_NET: Final = re.compile(r"net([0-9]{1,2})")
_PASSED: Final = re.compile(r"hostpci([0-9]{1,2})")
# The cards on the first bus; the ports of q35 for passed devices, and its first bus behind them.
_ON_FIRST_BUS, _PORTS, _BUS_OF_Q35 = 6, 4, 6
_UNITS: Final = {"": 1, "K": KIB, "M": MIB, "G": GIB, "T": TIB}
_SIZE: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGT]?)")
# A storage's id, and a name on it, without anything that has a meaning for a shell or as a program's option.
VOLUME: Final = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}:[A-Za-z0-9][A-Za-z0-9._/+@=:-]{0,400}")


# How to reach the disks of each type of storage while their VM is off (pve-storage, PVE/Storage/*Plugin.pm: path). While it
# runs, its QEMU gives them, wherever they are.
OFF_WAYS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("dir", "nfs", "cifs", "cephfs", "btrfs"), "a file (raw, qcow2 or vmdk)"),
    **dict.fromkeys(("lvm", "lvmthin"), "a logical volume, active for that time"),
    "zfspool": "a zvol",
    "rbd": "an image of Ceph as QEMU names it (not with krbd, which is mapped only while the VM runs)",
}
_NO_WAYS: Final[Mapping[str, str]] = {
    "iscsidirect": "whose volumes are in its target alone, and no path of the node",
    "zfs": "ZFS over iSCSI, whose volumes are in its target alone, and no path of the node",
    "glusterfs": "whose volumes have no path on the node",
}


def unreadable(storage_type: str) -> str | None:
    """Why volumes on such a storage cannot be read once their VM is off, and so not at the end of a warm migration."""
    return _NO_WAYS.get(storage_type)


@dataclass(frozen=True, slots=True)
class Drive:
    """A disk of the VM. `volume`: STORAGE:NAME, or a path on the node."""

    key: str
    volume: str
    options: Mapping[str, str]

    @property
    def bus(self) -> DiskBus:
        """The bus by the drive's key: `scsi0` is on scsi."""
        found = DRIVE.fullmatch(self.key)
        return BUSES[found.group(1)] if found else "scsi"

    @property
    def unit(self) -> int:
        """The number in the drive's key: `scsi0` is 0."""
        found = DRIVE.fullmatch(self.key)
        return int(found.group(2)) if found else 0

    @property
    def storage(self) -> str:
        return self.volume.partition(":")[0] if VOLUME.fullmatch(self.volume) else ""

    @property
    def size_bytes(self) -> int:
        return size(self.options.get("size", ""))

    @property
    def serial(self) -> str | None:
        """What the guest reads: of a disk on SCSI without a serial number, Proxmox VE's name for the drive (`device_id`)."""
        if (given := self.options.get("serial")) is None and self.bus == "scsi":
            return f"drive-{self.key}"
        return disk_serial(given and unquote(given))

    def is_on(self, option: str) -> bool:
        return is_on(self.options.get(option))


def chipset(config: Mapping[str, Any]) -> Chipset | None:
    """i440fx, unless `machine` says otherwise (`q35`, `pc-q35-9.0`)."""
    return chipset_named(options(config.get("machine", "pc"), "type").get("type", "pc"))


def linux_name(key: str, config: Mapping[str, Any]) -> str | None:
    """Of a card: net0 is device 18 on the first bus, and net5 the last one (PVE::QemuServer::PCI). On i440fx that bus has slots
    with numbers. On q35 it is behind two bridges, and four ports come before (pve-q35-4.0.cfg), so it is bus 6; with more
    ports, for passed devices, it is another one."""
    found = _NET.fullmatch(key)
    if found is None or int(found[1]) >= _ON_FIRST_BUS:
        return None
    device = 18 + int(found[1])
    match chipset(config):
        case "pc":
            return card_names.in_slot(device)
        case "q35" if all(int(passed[1]) < _PORTS for name in config if (passed := _PASSED.fullmatch(name))):
            return card_names.on_bus(_BUS_OF_Q35, device)
        case _:
            return None


def is_on(value: object) -> bool:
    return str(value).lower() in ("1", "on", "yes", "true")


def size(text: str) -> int:
    """Bytes; 0, where it cannot be read."""
    found = _SIZE.fullmatch(text)
    return int(float(found.group(1)) * _UNITS[found.group(2)]) if found else 0


def options(text: object, default: str = "file") -> dict[str, str]:
    """A property string. A value without a key belongs to `default`."""
    found: dict[str, str] = {}
    for part in str(text).split(","):
        name, equals, value = part.partition("=")
        found.setdefault(name.strip() if equals else default, (value if equals else name).strip())
    return found


def drives(config: Mapping[str, Any]) -> Iterator[Drive]:
    """The VM's own disks, by bus and number: no CD-ROMs, no drive for cloud-init, no empty ones."""
    order = list(BUSES)
    keys = [(found.group(1), int(found.group(2)), key) for key in config if (found := DRIVE.fullmatch(key))]
    for _, _, key in sorted(keys, key=lambda one: (order.index(one[0]), one[1])):
        read = options(config[key])
        volume = read.pop("file", read.pop("volume", ""))
        if read.get("media", "disk") == "disk" and volume not in ("", "none"):
            yield Drive(key, volume, read)


def cloud_init(config: Mapping[str, Any]) -> str | None:
    """The key of the drive for cloud-init."""
    return next((key for key, value in config.items() if DRIVE.fullmatch(key) and "cloudinit" in str(value)), None)


# Parts of a setting that the VM does not have here, though the setting itself is read.
_LIMITS: Final = re.compile(r"(iops|mbps|bps)(_.*)?")
_OF_DRIVE: Final = ("ro", "model", "product", "vendor")
_OF_NET: Final = ("trunks", "rate", "mtu")
_OF_CPU: Final = ("flags", "hidden", "hv-vendor-id", "phys-bits", "reported-model")


def parts_not_taken_over(config: Mapping[str, Any]) -> Iterator[str]:
    """Such parts: `smbios1 sku`, `ro of scsi0`."""
    smbios = options(config.get("smbios1", ""), "uuid")
    yield from (f"smbios1 {name}" for name, value in smbios.items() if name not in ("uuid", "serial", "base64") and value)
    for drive in drives(config):
        yield from (f"{name} of {drive.key}" for name in _OF_DRIVE if drive.options.get(name, "0") != "0")
        if any(_LIMITS.fullmatch(name) for name in drive.options):
            yield f"limits of {drive.key}"
    for key, card in nets(config):
        yield from (f"{name} of {key}" for name in _OF_NET if card.get(name))
    cpu = options(config.get("cpu", ""), "cputype")
    yield from (f"cpu {name}" for name in _OF_CPU if cpu.get(name, "0") != "0")
    if (tpm := volume_of(config, "tpmstate0")) is not None and tpm.options.get("version") == "v1.2":
        yield "TPM version 1.2"


def media(config: Mapping[str, Any]) -> list[str]:
    """What is in its CD-ROM drives; the drive for cloud-init is none of them."""
    found = [options(value) for key, value in sorted(config.items()) if DRIVE.fullmatch(key) and "cloudinit" not in str(value)]
    volumes = [read.get("file", read.get("volume", "")) for read in found if read.get("media") == "cdrom"]
    return [volume.rpartition("/")[2] for volume in volumes if volume not in ("", "none")]


def volume_of(config: Mapping[str, Any], key: str) -> Drive | None:
    """A volume that is not a disk of the guest: `efidisk0`, `tpmstate0`."""
    if key not in config:
        return None
    read = options(config[key])
    return Drive(key, read.pop("file", read.pop("volume", "")), read)


def nets(config: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Network cards by key, with `model` and `macaddr` from either form."""
    keys = [(int(found.group(1)), key) for key in config if (found := _NET.fullmatch(key))]
    for _, key in sorted(keys):
        read = options(config[key], "model")
        if "macaddr" not in read:
            # virtio=BC:24:11:00:00:01 is short for model=virtio,macaddr=…
            first = next(iter(read), "")
            read["model"], read["macaddr"] = (first, read[first]) if first != "model" else (read["model"], "")
        yield key, read


def boot_order(config: Mapping[str, Any]) -> list[str]:
    """Keys in boot order. `boot: order=scsi0;net0`, or for older VMs `boot: cdn` with `bootdisk: scsi0`."""
    read = options(config.get("boot", ""), "legacy")
    if "order" in read:
        return [key for key in re.split(r"[;,]", read["order"]) if key]
    disk = str(config.get("bootdisk", "")) or next((drive.key for drive in drives(config)), "")
    return [disk] if "c" in read.get("legacy", "cdn") and disk else []


def may_freeze(config: Mapping[str, Any]) -> bool:
    """Whether it has an agent, and freezing for backups is not switched off (`guest-fsfreeze`, formerly
    `freeze-fs-on-backup`)."""
    agent = options(config.get("agent", "0"), "enabled")
    freezes = agent.get("guest-fsfreeze", agent.get("freeze-fs-on-backup", agent.get("freeze-fs", "1")))
    return is_on(agent.get("enabled", "0")) and is_on(freezes)


def numbered(config: Mapping[str, Any], name: str) -> list[str]:
    return sorted(key for key in config if re.fullmatch(rf"{name}[0-9]+", key))


def number(value: object, otherwise: int) -> int:
    """The value as a number; `otherwise`, where it is none."""
    text = str(value).strip()
    return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else otherwise
