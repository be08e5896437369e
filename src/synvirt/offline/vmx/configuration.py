"""VMware's configuration files: .vmx and .vmsd → a VmManifest and the file of each disk.

The syntax has no specification; this is what ESX, Workstation, Fusion and Player write:

    .encoding = "UTF-8"            the encoding of the values
    displayName = "web |22one|22"  |XX is a character that would end the value, or the pipe itself
    scsi0:0.fileName = "web.vmdk"  keys in any case; values mostly in quotes

A missing key has a default, and a device exists only if its `present` is TRUE.
"""

import codecs
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.machines import card_names, concerns, reaching, smbios
from synvirt.machines.guest_os import guest_os
from synvirt.machines.texts import clean, is_true, uuid_of, vmware_encoding, whole_number
from synvirt.model.machine import Concern, Disk, DiskBus, Nic, Snapshot, VmManifest
from synvirt.sizes import MIB

# Real ones have 2 to 40 KiB; a machine with all devices and an encrypted part some 200.
FILE_MAX_BYTES = 1 << 20
_ENTRIES_MAX = 20_000
# Workstation's and ESX' default where memsize is left out.
_MEMORY_DEFAULT_MIB = 256
_CPUS_MAX, _MEMORY_MAX_MIB = 1024, 64 << 20

_LINE = re.compile(r'\s*([A-Za-z0-9_.:\-]+)\s*=\s*(?:"([^"]*)"?|([^"#]*))')
_ESCAPE = re.compile(r"\|([0-9A-Fa-f]{2})")
_ENCODING = re.compile(rb'^\s*\.encoding\s*=\s*"([A-Za-z0-9_\-]{1,40})"', re.MULTILINE | re.IGNORECASE)
_DISK_KEY = re.compile(r"((?:scsi|sata|ide|nvme)\d{1,2}):(\d{1,3})\.filename")
_NIC_KEY = re.compile(r"ethernet(\d{1,2})\.present")
# What names a card's network, the plainest first. Of a distributed switch's and of NSX' only ids are there.
_NETWORKS = ("networkname", "vnet", "dvs.portgroupid", "opaquenetwork.id", "connectiontype")
_PASSTHROUGH_KEY = re.compile(r"(pcipassthru\d{1,3})\.present")
_MAC = re.compile(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}")
# Kinds of controllers, in the order of their disks.
_KINDS = ("ide", "sata", "scsi", "nvme")
_PLACE = re.compile(r"(scsi|sata|ide|nvme)\d{1,2}:\d{1,3}")
_PASSED_THROUGH = re.compile(r"scsi-passthru|scsi-nonpassthru-tape|atapi-passthru", re.IGNORECASE)
# A device that is not a hard disk: `cdrom-image`, `cdrom-raw`, `atapi-cdrom`, `scsi-passthru`, …
_NO_DISK = re.compile(r"cdrom|floppy|passthru|tape", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Machine:
    """A parsed .vmx: `files` has the file of each disk, as written there, by the disk's key."""

    manifest: VmManifest
    files: Mapping[str, str]


def dictionary(data: bytes, name: str) -> dict[str, str]:
    """The entries of a .vmx or .vmsd, keys in lower case. Like VMware, it skips a line that is no entry."""
    if len(data) > FILE_MAX_BYTES:
        raise MalformedArchive(f"{name} has {len(data)} bytes; a VMX file has {FILE_MAX_BYTES} at most")
    entries: dict[str, str] = {}
    for number, line in enumerate(_text(data).splitlines(), start=1):
        match = _LINE.match(line)
        if match is None:
            continue
        value = match[2] if match[2] is not None else (match[3] or "").strip()
        entries[match[1].lower()] = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), value)
        if len(entries) > _ENTRIES_MAX:
            raise MalformedArchive(f"{name}, line {number}: over {_ENTRIES_MAX} entries; no VM has")
    return entries


def _text(data: bytes) -> str:
    """The text in the encoding that the file names; without a known one, UTF-8 or else Windows' western one."""
    found = _ENCODING.search(data)
    for encoding in (vmware_encoding(found[1].decode()) if found else "utf-8", "utf-8"):
        try:
            return data.removeprefix(codecs.BOM_UTF8).decode(encoding)
        except (UnicodeDecodeError, LookupError):
            continue
    return data.decode("cp1252", "replace")


def parse(data: bytes, name: str) -> Machine:
    """A .vmx file as a Machine. MalformedArchive; UnsupportedFormat where it is encrypted."""
    entries = dictionary(data, name)
    if not any(key in entries for key in ("config.version", "virtualhw.version", "displayname", "guestos", "encryption.data")):
        raise MalformedArchive(f"{name} is not a VMX file: it has none of the entries that every VM has")
    if "encryption.data" in entries and entries.get("vmx.encryptiontype", "").lower() != "partial":
        raise UnsupportedFormat(
            f"{name} is encrypted: its hardware can be read with its password only",
            hint="Remove the encryption (Workstation: VM settings, Options, Access Control), or export the VM as OVF.",
        )
    disks, files, found = _disks(entries)
    return Machine(_manifest(entries, disks, found), files)


def snapshots(data: bytes, name: str) -> tuple[Snapshot, ...]:
    """The snapshots that a .vmsd lists."""
    entries = dictionary(data, name)
    count = min(whole_number(entries.get("snapshot.numsnapshots", "")) or 0, 1000)
    return tuple(
        Snapshot(
            id=entries[f"snapshot{number}.uid"],
            name=clean(entries.get(f"snapshot{number}.displayname", "")),
            created_at=_created_at(entries, number),
        )
        for number in range(count)
        if f"snapshot{number}.uid" in entries
    )


def _created_at(entries: Mapping[str, str], number: int) -> datetime | None:
    """Microseconds since 1970 in two halves; the lower one is written as a signed number."""
    try:
        high, low = (int(entries[f"snapshot{number}.createtime{half}"][:12]) for half in ("high", "low"))
        return datetime.fromtimestamp(((high << 32) + (low & 0xFFFFFFFF)) / 1_000_000, UTC)
    except (KeyError, ValueError, OverflowError, OSError):
        return None


def _disks(entries: Mapping[str, str]) -> tuple[tuple[Disk, ...], dict[str, str], list[Concern]]:
    disks: list[Disk] = []
    files: dict[str, str] = {}
    found: list[Concern] = []
    order = [node.strip().lower() for node in entries.get("bios.hddorder", "").split(",")]
    for controller, unit, file in _attached(entries):
        key = f"{controller}:{unit}"
        bus = _bus(controller)
        files[key] = file
        disks.append(
            Disk(
                key=key,
                label=key.replace(":", "-"),
                capacity_bytes=0,
                format="vmdk",
                bus=bus,
                controller=controller,
                unit=unit,
                boot_order=order.index(key) + 1 if key in order else None,
                source_path=clean(file),
            )
        )
        mode = entries.get(f"{key}.mode", "").lower()
        if mode.startswith("independent"):
            found.append(concerns.independent_disk(key, mode))
        shared = entries.get(f"{controller}.sharedbus", "").lower() not in ("", "none")
        if shared or entries.get(f"{key}.sharing", "").lower() == "multi-writer":
            found.append(concerns.shared_disk(key))
    return tuple(disks), files, found


def _attached(entries: Mapping[str, str]) -> Iterator[tuple[str, int, str]]:
    """Hard disks that are present and have a file: controllers in the order ide, sata, scsi, nvme, as VMware's BIOS has no
    order of its own unless `bios.hddOrder` gives one; then by number and unit."""
    devices = ((match[1], int(match[2]), file) for key, file in entries.items() if (match := _DISK_KEY.fullmatch(key)))
    for controller, unit, file in sorted(devices, key=lambda device: (_KINDS.index(device[0].rstrip("0123456789")), *device)):
        key = f"{controller}:{unit}"
        if not is_true(entries.get(f"{key}.present", "true")) or not is_true(entries.get(f"{controller}.present", "true")):
            continue
        if not file or _NO_DISK.search(entries.get(f"{key}.devicetype", "")) or file.lower().endswith(".iso"):
            continue
        yield controller, unit, file


def _passed_through_disks(entries: Mapping[str, str]) -> list[str]:
    """SCSI and IDE devices of the host: tapes, changers, drives."""
    keys = (key.removesuffix(".devicetype") for key, value in entries.items() if _PASSED_THROUGH.search(value))
    return sorted(key for key in keys if _PLACE.fullmatch(key) and is_true(entries.get(f"{key}.present", "true")))


def _bus(controller: str) -> DiskBus:
    buses: dict[str, DiskBus] = {"ide": "ide", "sata": "sata", "nvme": "nvme"}
    return buses.get(controller.rstrip("0123456789"), "scsi")


def _manifest(entries: Mapping[str, str], disks: tuple[Disk, ...], disk_concerns: list[Concern]) -> VmManifest:
    uefi = entries.get("firmware", "").lower() == "efi"
    secure_boot = uefi and is_true(entries.get("uefi.secureboot.enabled"))
    tpm = is_true(entries.get("vtpm.present")) or is_true(entries.get("managedvm.autoaddvtpm"))
    guest = guest_os(vendor_id=clean(entries.get("guestos", "")), description=clean(entries.get("guestinfo.detailed.data", "")))
    cpus = min(whole_number(entries.get("numvcpus", "")) or 1, _CPUS_MAX)
    cores = whole_number(entries.get("cpuid.corespersocket", "")) or 1
    memory_given = whole_number(entries.get("memsize", ""))
    memory = min(memory_given or _MEMORY_DEFAULT_MIB, _MEMORY_MAX_MIB)
    suspended = bool(entries.get("checkpoint.vmstate"))
    found = list(disk_concerns)
    if not disks:
        found.append(concerns.no_disks())
    if suspended:
        found.append(concerns.suspended())
    if not memory_given:
        found.append(concerns.hardware_incomplete("memory"))
    passed = [*_present(entries, _PASSTHROUGH_KEY), *_passed_through_disks(entries)]
    found += [concerns.passthrough_device(key) for key in passed]
    if reaches := reaching.vmware(entries):
        found.append(concerns.left_out(reaches))
    if settings := list(_settings_left_out(entries, disks)):
        found.append(concerns.settings_left_out(settings))
    if media := [name for key in sorted(entries) if (name := _image_in(entries, key.removesuffix(".filename"))) is not None]:
        found.append(concerns.removable_media_left_out(tuple(dict.fromkeys(media))))
    found += concerns.of_machine(uefi=uefi, secure_boot=secure_boot, tpm=tpm, guest=guest)
    return VmManifest(
        vm_id=clean(entries.get("uuid.bios", "")) or clean(entries.get("displayname", "")) or "imported",
        name=clean(entries.get("displayname", "")) or "imported",
        uuid=(uuid := uuid_of(entries.get("uuid.bios", ""))),
        uuid_reversed_for=smbios.of_vmware(entries.get("virtualhw.version", "")),
        serial=smbios.vmware_serial(uuid, entries),
        power_state="suspended" if suspended else "off",
        firmware="uefi" if uefi else "bios",
        secure_boot=secure_boot,
        tpm=tpm,
        cpu_count=cpus,
        cores_per_socket=cores if cpus % cores == 0 else 1,
        memory_bytes=memory * MIB,
        guest_os=guest,
        cbt_reason="an offline import is a copy of files: nothing changes in them",
        disks=disks,
        nics=tuple(_nic(entries, key) for key in _present(entries, _NIC_KEY, "ethernet")),
        concerns=tuple(found),
    )


def _settings_left_out(entries: Mapping[str, str], disks: tuple[Disk, ...]) -> Iterator[str]:
    """SMBIOS values, and the rest that is not made here."""
    yield from map(clean, smbios.vmware_left_out(entries))
    yield from (f"{disk.key} forgets" for disk in disks if entries.get(f"{disk.key}.mode", "").endswith("nonpersistent"))
    if is_true(entries.get("sound.present")):
        yield "sound"


def _image_in(entries: Mapping[str, str], device: str) -> str | None:
    """The image in a CD-ROM or floppy drive; None: there is none, or a device of the host."""
    file, kind = entries.get(f"{device}.filename", ""), entries.get(f"{device}.devicetype", "").lower()
    floppy = re.fullmatch(r"floppy\d", device) and entries.get(f"{device}.filetype", "").lower() == "file"
    holds = floppy or (_PLACE.fullmatch(device) and kind == "cdrom-image")
    return clean(re.split(r"[/\\]", file)[-1]) if file and holds and is_true(entries.get(f"{device}.present", "true")) else None


def _present(entries: Mapping[str, str], pattern: re.Pattern[str], prefix: str = "") -> list[str]:
    found = [prefix + match[1] for key, value in entries.items() if (match := pattern.fullmatch(key)) and is_true(value)]
    return sorted(found, key=lambda name: (len(name), name))


def _nic(entries: Mapping[str, str], key: str) -> Nic:
    # `static` MACs are in address, those that VMware made in generatedAddress; a file may have both.
    static = entries.get(f"{key}.addresstype", "").lower() == "static"
    candidates = (entries.get(f"{key}.address", ""), entries.get(f"{key}.generatedaddress", ""))
    ordered = candidates if static else reversed(candidates)
    mac = next((value.strip().lower().replace("-", ":") for value in ordered if value.strip()), "")
    network = next((name for kept in _NETWORKS if (name := entries.get(f"{key}.{kept}"))), "")
    return Nic(
        key=key,
        mac=mac if _MAC.fullmatch(mac) else None,
        model=entries.get(f"{key}.virtualdev", "vlance").lower(),
        network=clean(network),
        connected=is_true(entries.get(f"{key}.startconnected", "true")),
        linux_name=card_names.vmware(whole_number(entries.get(f"{key}.pcislotnumber", ""))),
    )
