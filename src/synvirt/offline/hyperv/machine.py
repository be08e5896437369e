"""Interprets the keys of a Hyper-V configuration; the same for .vmcx and the older .xml.

    configuration
      properties      name, global_id, subtype (0: generation 1, 1: generation 2), type_id, creation_time
      settings        processors: count, vnuma · memory: bank: size … in MiB
      security        settings: tpm_enabled, shielding_requested …
      manifest        vdevNNN: device (its type), instance, name         the devices, in their order
      _INSTANCE_      a device's own keys: controllerN: driveN: type, pathname · MacAddress … · secure_boot_enabled …

There is no public schema: the keys are those of configurations that Hyper-V of 2012 R2, 2016 and 2019 wrote. A missing key
means Hyper-V's own default; only the list of devices is required.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PureWindowsPath

from synvirt.errors import MalformedArchive
from synvirt.machines import concerns, reaching, smbios
from synvirt.machines.texts import clean, uuid_of
from synvirt.model.machine import Concern, Disk, DiskBus, GuestOs, Nic, Snapshot, VmManifest
from synvirt.offline.hyperv.storage import Tree, Value
from synvirt.sizes import MIB

BIOS, IDE = "ac6b8dc1-3257-4a70-b1b2-a9c9215659ad", "83f8638b-8dca-4152-9eda-2ca8b33039b4"
SCSI, ETHERNET = "d422512d-2bf2-4752-809d-7b82b5fcb1b4", "2fc216b0-d2e2-4967-9b6d-b8a5c9ca2778"
# Devices of the host that a machine may have: PCI Express (DDA), a part of a GPU, named Fibre Channel.
_PASSED = {"2fcc454e-a36a-4c77-bb5e-a2d75a51f02c": "a PCI Express device", "99dcd00c-fbd6-42d3-9dfd-1b5ad7058f61": "a GPU"}
# The VLAN of a card, a feature of its connection (Msvm_EthernetSwitchPortVlanSettingData): there only if one was set. Its
# values are bytes that no page describes.
_VLAN = "feature_952c5004-4465-451c-8cb8-fa9ab382b773"
_FIBRE_CHANNEL = re.compile(r"fib(re|er) ?channel", re.IGNORECASE)
# A drive holds the file of a disk, nothing, or something other than a hard disk; with any other type a disk of the host.
_FILE, _EMPTY, _REMOVABLE = "VHD", frozenset({"", "NONE"}), frozenset({"ISO", "DVD", "CD", "VFD", "FLOPPY"})
_DISK_FILE = (".vhd", ".vhdx", ".avhd", ".avhdx", ".vhds")
# MicrosoftWindows, one of the templates for the boot loaders that the firmware trusts (Set-VMFirmware -SecureBootTemplate).
_WINDOWS_TEMPLATE = "1734c6e8-3154-4dda-ba5f-a874cc483422"
# Hyper-V allows 4 IDE and 256 SCSI disks, 12 network cards, 2048 processors and 240 TiB; ours are the limits of the plan.
_DISKS_MAX, _CPUS_MAX, _MEMORY_MAX_MIB = 1000, 1024, 64 << 20
_DEFAULT_CPUS, _DEFAULT_MEMORY_MIB = 1, 1024


@dataclass(frozen=True, slots=True)
class Drive:
    """The content of a disk's drive: a file in Windows' spelling, or (`physical`) a disk of the host."""

    path: str
    physical: bool = False

    @property
    def file_name(self) -> str:
        return clean(PureWindowsPath(self.path).name)


@dataclass(frozen=True, slots=True)
class Machine:
    """`drives`: by the disk's key. The manifest's disks are not yet measured."""

    manifest: VmManifest
    drives: Mapping[str, Drive]


@dataclass(frozen=True, slots=True)
class _Device:
    kind: str
    instance: str
    name: str
    keys: Tree


def machine(tree: Tree, file: str, *, snapshots: tuple[Snapshot, ...] = (), saved: bool = False) -> Machine:
    """MalformedArchive, where `tree` is no configuration. `file` is its name, for errors and for a machine without a name;
    `saved`: the machine's memory was saved, which other files show."""
    configuration = _node(tree, "configuration")
    devices = list(_devices(configuration))
    if not devices:
        raise MalformedArchive(f"{file} lists no devices: it is not a configuration of a Hyper-V machine")
    disks, drives, found = _disks(devices, file)
    bios = next((device.keys for device in devices if device.kind == BIOS), {})
    security = _node(configuration, "security", "settings")
    uefi, tpm = _number(configuration, "properties", "subtype") == 1, _flag(security, "tpm_enabled")
    secure_boot = uefi and _flag(bios, "secure_boot_enabled")
    guest = _guest(bios) if secure_boot else GuestOs()
    memory, dynamic = _memory(configuration)
    found += [*dynamic, *_concerns(configuration, devices, security)]
    if saved:
        found.append(concerns.suspended())
    found += concerns.of_machine(uefi=uefi, secure_boot=secure_boot, tpm=tpm, guest=guest, snapshots=len(snapshots))
    cpus = min(max(_number(configuration, "settings", "processors", "count") or _DEFAULT_CPUS, 1), _CPUS_MAX)
    identity = uuid_of(_text(configuration, "properties", "global_id"))
    manifest = VmManifest(
        vm_id=identity or clean(file),
        name=clean(_text(configuration, "properties", "name")) or "imported",
        uuid=uuid_of(_text(bios, "bios_guid")) or identity,  # the guest sees the firmware's, and not the machine's id
        uuid_reversed_for=smbios.of_hyperv(generation=2 if uefi else 1),
        serial=smbios.serial_of(_text(bios, "bios_serial_number")),
        power_state="suspended" if saved else "off",
        firmware="uefi" if uefi else "bios",
        secure_boot=secure_boot,
        tpm=tpm,
        cpu_count=cpus,
        cores_per_socket=_cores(configuration, cpus),
        memory_bytes=memory * MIB,
        guest_os=guest,
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=disks,
        nics=tuple(_nic(number, device) for number, device in enumerate(_adapters(devices))),
        snapshots=snapshots,
        concerns=tuple(found),
    )
    return Machine(manifest, drives)


def checkpoint(tree: Tree) -> Snapshot | None:
    """The checkpoint of a configuration in the folder Snapshots; None for any other configuration."""
    properties = _node(tree, "configuration", "properties")
    identity = uuid_of(_text(properties, "global_id"))
    if identity is None or _text(properties, "type_id") not in ("Snapshots", ""):
        return None
    return Snapshot(id=identity, name=clean(_text(properties, "name")), created_at=_time(properties.get("creation_time")))


def saved_state_files(tree: Tree) -> bool:
    """Whether the configuration names files of saved memory and devices, as those before 2016 do."""
    saved = _node(tree, "configuration", "savedstate")
    return any(_text(saved, key) for key in ("memlocation", "vsvlocation"))


# ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _devices(configuration: Tree) -> Iterator[_Device]:
    """The devices by their numbers, the order in which Hyper-V counts controllers."""
    own = {key.lower(): value for key, value in configuration.items() if isinstance(value, dict)}
    manifest = _node(configuration, "manifest")
    for key in sorted(key for key in manifest if key.startswith("vdev")):
        entry = _node(manifest, key)
        instance = uuid_of(_text(entry, "instance")) or ""
        kind = uuid_of(_text(entry, "device")) or ""
        yield _Device(kind, instance, clean(_text(entry, "name")), own.get(f"_{instance}_", {}))


def _disks(devices: list[_Device], file: str) -> tuple[tuple[Disk, ...], dict[str, Drive], list[Concern]]:
    disks: list[Disk] = []
    drives: dict[str, Drive] = {}
    found: list[Concern] = []
    media: list[str] = []
    for bus, controller, unit, drive in _drives(devices):
        kind, path = _text(drive, "type").upper(), _text(drive, "pathname")
        if kind in _EMPTY or (kind == _FILE and not path):
            continue
        if kind in _REMOVABLE:
            media += [clean(PureWindowsPath(path).name)] if path else []
            continue
        key = f"{bus}{controller}:{unit}"
        if key in drives or len(disks) >= _DISKS_MAX:
            raise MalformedArchive(f"{file}: two disks are at {key}, or over {_DISKS_MAX} in all")
        drives[key] = Drive(path, physical=not path.lower().endswith(_DISK_FILE))
        if _flag(drive, "persistent_reservations_supported") or path.lower().endswith(".vhds"):
            found.append(concerns.shared_disk(key))
        disks.append(
            Disk(
                key=key,
                label=f"{bus.upper()} {controller}:{unit}",
                capacity_bytes=0,
                format="vhdx",
                bus=bus,
                controller=f"{bus}{controller}",
                unit=unit,
                # Generation 1 boots from the first IDE disk. The boot order of generation 2 is in its UEFI variables.
                boot_order=None if disks else 1,
            )
        )
    if media:
        found.append(concerns.removable_media_left_out(tuple(media)))
    if not disks:
        found.append(concerns.no_disks())
    return tuple(disks), drives, found


def _drives(devices: list[_Device]) -> Iterator[tuple[DiskBus, int, int, Tree]]:
    """(bus, controller, unit, keys): one IDE device has both IDE controllers, and each SCSI device is one controller."""
    for device in devices:
        if device.kind == IDE:
            yield from (
                ("ide", number, *drive)
                for number, keys in _numbered(device.keys, "controller")
                for drive in _numbered(keys, "drive")
            )
    for number, device in enumerate(device for device in devices if device.kind == SCSI):
        yield from (
            ("scsi", number, *drive) for _, keys in _numbered(device.keys, "controller") for drive in _numbered(keys, "drive")
        )


def _numbered(keys: Tree, word: str) -> list[tuple[int, Tree]]:
    """The nodes `word0`, `word1` …, by their numbers."""
    names = {key: re.fullmatch(word + r"([0-9]{1,4})", key) for key in keys}
    return sorted(((int(found[1]), _node(keys, key)) for key, found in names.items() if found), key=lambda each: each[0])


def _adapters(devices: list[_Device]) -> list[_Device]:
    """Synthetic adapters, and the legacy one that generation 1 can boot from: all with an address."""
    return [device for device in devices if "MacAddress" in device.keys]


def _nic(number: int, device: _Device) -> Nic:
    digits = re.sub(r"[^0-9a-f]", "", _text(device.keys, "MacAddress").lower())
    # A dynamic address is all zeros until the machine starts for the first time.
    known = len(digits) == 12 and set(digits) != {"0"}
    connection = _node(device.keys, "Connection")
    return Nic(
        key=f"adapter{number}",
        mac=":".join(re.findall("..", digits)) if known else None,
        model="netvsc" if device.kind == ETHERNET else "tulip",
        network=clean(_text(connection, "AltSwitchName") or _text(device.keys, "SwitchName")),
        connected=_flag(device.keys, "IsConnected"),
    )


# ── the machine's own traits ─────────────────────────────────────────────────────────────────────────────────────────


def _guest(bios: Tree) -> GuestOs:
    """Hyper-V does not name the guest's system. But a firmware that trusts only Windows' loader starts nothing else."""
    trusts_windows = uuid_of(_text(bios, "secure_boot_template_id")) == _WINDOWS_TEMPLATE
    return GuestOs(family="windows", name="Windows (by the Secure Boot template)") if trusts_windows else GuestOs()


def _concerns(configuration: Tree, devices: list[_Device], security: Tree) -> list[Concern]:
    found = []
    if _flag(security, "shielding_requested") or _flag(security, "data_protection_requested"):
        found.append(concerns.shielded())
    passed: dict[str, int] = {}
    for device in devices:
        what = _PASSED.get(device.kind) or (device.name if _FIBRE_CHANNEL.search(device.name) else None)
        if what is not None:
            passed[what] = passed.get(what, 0) + 1
    found += [concerns.passthrough_device(what if count == 1 else f"{what} ({count} times)") for what, count in passed.items()]
    if _number(configuration, "settings", "memory", "bank", "size") is None:
        found.append(concerns.hardware_incomplete("memory"))
    if _number(configuration, "settings", "processors", "count") is None:
        found.append(concerns.hardware_incomplete("processors"))
    if vlans := list(_vlans(devices)):
        found.append(concerns.settings_left_out(vlans))
    if reaches := reaching.hyperv(configuration):
        found.append(concerns.left_out(reaches))
    return found


def _vlans(devices: list[_Device]) -> Iterator[str]:
    for number, device in enumerate(_adapters(devices)):
        if any(key.lower() == _VLAN for key in _node(device.keys, "Connection")):
            nic = _nic(number, device)
            yield f"VLAN settings of {nic.key} ({nic.network or 'no switch'})"


def _memory(configuration: Tree) -> tuple[int, list[Concern]]:
    """MiB at start. With dynamic memory Hyper-V then varies it between the reservation and the limit."""
    bank = _node(configuration, "settings", "memory", "bank")
    size = min(_number(bank, "size") or _DEFAULT_MEMORY_MIB, _MEMORY_MAX_MIB)
    if not _flag(bank, "dynamic_memory_enabled"):
        return size, []
    least, most = (_number(bank, key) or size for key in ("reservation", "limit"))
    return size, [concerns.dynamic_memory(size, least, most)]


def _cores(configuration: Tree, cpus: int) -> int:
    """Hyper-V shows sockets with as many cores as its virtual NUMA allows; client editions of Windows use only two sockets."""
    vnuma = _node(configuration, "settings", "processors", "vnuma")
    most = (_number(vnuma, "count_per_node", "max") or cpus) * (_number(vnuma, "node_per_socket", "max") or 1)
    return most if 0 < most <= cpus and cpus % most == 0 else cpus


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _node(tree: Tree, *path: str) -> Tree:
    """The node at the path; an empty one, where there is none."""
    for key in path:
        inner = tree.get(key)
        if not isinstance(inner, dict):
            return {}
        tree = inner
    return tree


def _leaf(tree: Tree, path: tuple[str, ...]) -> Value | None:
    return _node(tree, *path[:-1]).get(path[-1])


def _text(tree: Tree, *path: str) -> str:
    value = _leaf(tree, path)
    return value.strip() if isinstance(value, str) else ""


def _number(tree: Tree, *path: str) -> int | None:
    """A natural number."""
    value = _leaf(tree, path)
    return value if isinstance(value, int) and value >= 0 else None


def _flag(tree: Tree, *path: str) -> bool:
    return _leaf(tree, path) in (True, 1)


def _time(value: Value | None) -> datetime | None:
    """A FILETIME: tenths of microseconds since 1601, as eight bytes."""
    if not isinstance(value, bytes) or len(value) != 8:
        return None
    try:
        return datetime(1601, 1, 1, tzinfo=UTC) + timedelta(microseconds=int.from_bytes(value, "little") // 10)
    except OverflowError:
        return None
