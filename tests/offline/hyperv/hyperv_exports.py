"""Hyper-V exports by hand, since no Windows is here: a writer of the .vmcx format of its own, and the folder around it.

The format is written as Microsoft's OpenVMM project documents it («HyperV Storage File Format», version 4.0); sizes, places and
the names of the keys are those of a .vmcx that a Windows Server 2019 wrote. Nothing here knows how the product reads.
"""

import base64
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID
from xml.sax.saxutils import escape

Tree = dict[str, Any]
PAGE = 4096
LOG_BYTES = 9 * PAGE

MACHINE = "282874FC-59D6-4F30-BC04-5FDD909C82E0"
BIOS_GUID = "967df1ba-2c00-4998-9f1b-d60bcc0c4b90"
BIOS_SERIAL = "6534-0143-5923-8126-3170-4385-20"
CHECKPOINT = "0F6D7B3A-52B4-4C0E-9C0A-63E2A1B7C5D4"
BIOS, IDE = "ac6b8dc1-3257-4a70-b1b2-a9c9215659ad", "83f8638b-8dca-4152-9eda-2ca8b33039b4"
SCSI, ETHERNET = "d422512d-2bf2-4752-809d-7b82b5fcb1b4", "2fc216b0-d2e2-4967-9b6d-b8a5c9ca2778"
NO_TEMPLATE = "00000000-0000-0000-0000-000000000000"
WINDOWS_TEMPLATE = "1734c6e8-3154-4dda-ba5f-a874cc483422"
LINUX_TEMPLATE = "272e7447-90a4-4563-a4b9-8e4ab00526ce"


# ── the storage: a tree of keys, as bytes ────────────────────────────────────────────────────────────────────────────


def crc(data: bytes, at: int) -> bytes:
    """`data` with its CRC-32 in the four bytes at `at`, which count as zeros."""
    blank = data[:at] + bytes(4) + data[at + 4 :]
    return data[:at] + struct.pack("<I", zlib.crc32(blank)) + data[at + 4 :]


class Writer:
    """Key tables are filled one after the other; what is left of one is a free entry, or slack of its last entry."""

    def __init__(self) -> None:
        self.tables: list[bytearray] = []
        self.last = 0
        self.blobs: list[bytes] = []
        # Where a blob lies is known once all tables are: (table, entry's place, entry without its checksum).
        self.pointing: list[tuple[int, int, bytes, int]] = []

    def node(self, tree: Tree, table: int = 0, offset: int = 0) -> None:
        for sequence, (name, value) in enumerate(tree.items(), 1):
            place = self.entry(name, value, table, offset, sequence)
            if isinstance(value, dict):
                self.node(value, *place)

    def entry(self, name: str, value: Any, table: int, offset: int, sequence: int) -> tuple[int, int]:
        kind, flags, data = self.value(value)
        key = name.encode() + b"\0"
        size = 21 + len(key) + len(data)
        content = struct.pack("<BBIHIIIB", kind, flags, size, table, offset, 0, sequence, len(key)) + key + data
        place = self.room(size)
        if flags & 1:
            self.pointing.append((*place, content, len(self.blobs) - 1))
        self.tables[-1] += crc(content, 12)
        self.last = place[1]
        return place

    def value(self, value: Any) -> tuple[int, int, bytes]:
        match value:
            case dict():
                return 9, 0, struct.pack("<QI", 0, len(value) + 1)
            case bool():
                return 8, 0, struct.pack("<i", value)
            case int():
                return (3, 0, struct.pack("<q", value)) if value < 1 << 63 else (4, 0, struct.pack("<Q", value))
            case float():
                return 5, 0, struct.pack("<d", value)
        kind, data = (6, value.encode("utf-16-le")) if isinstance(value, str) else (7, bytes(value))
        if len(data) < 2048:
            return kind, 0, struct.pack("<I", len(data)) + data
        self.blobs.append(data)
        return kind, 1, bytes(12)

    def room(self, size: int) -> tuple[int, int]:
        if not self.tables or len(self.tables[-1]) + size > PAGE:
            self.close()
            number = len(self.tables) + 1
            self.tables.append(bytearray(crc(struct.pack("<HHHI", 2, number, 3, 0), 6)))
        return len(self.tables), len(self.tables[-1])

    def close(self) -> None:
        """A free entry must be larger than its header; less room than that goes to the last entry."""
        if not self.tables or len(self.tables[-1]) == PAGE:
            return
        table = self.tables[-1]
        left = PAGE - len(table)
        if left > 21:
            table += crc(struct.pack("<BBIHIIIB", 1, 0, left, 0, 0, 0, 0, 0), 12).ljust(left, b"\0")
            return
        header = bytes(table[self.last : self.last + 21])
        kind, flags, size, *rest, _, sequence, name = struct.unpack("<BBIHIIIB", header)
        whole = struct.pack("<BBIHIIIB", kind, flags, size + left, *rest, 0, sequence, name) + bytes(table[self.last + 21 :])
        self.pointing = [
            (number, place, whole if (number, place) == (len(self.tables), self.last) else content, blob)
            for number, place, content, blob in self.pointing
        ]
        table[self.last :] = crc(whole, 12) + bytes(left)


def storage(
    tree: Tree,
    *,
    version: int = 0x400,
    sequences: tuple[int, int] = (25, 24),
    replay: Mapping[int, bytes] | None = None,
    objects_at_once: int = 227,
) -> bytes:
    """A file of that tree. `replay`: what the log has for the places in the file, as if power was lost before it got there.
    `objects_at_once`: entries of an object table; the last one leads to the next table."""
    writer = Writer()
    writer.node(tree)
    writer.close()
    blobs = [(len(blob), -(-len(blob) // PAGE) * PAGE) for blob in writer.blobs]
    count = len(writer.tables) + len(blobs)
    directories = max(1, -(-count // (objects_at_once - 1)))
    at = 2 * PAGE + directories * PAGE
    tables_at = [at + number * PAGE for number in range(len(writer.tables))]
    at += len(tables_at) * PAGE
    blobs_at = []
    for _, room in blobs:
        blobs_at.append(at)
        at += room
    log_at = at
    for number, place, content, blob in writer.pointing:
        size, room = blobs[blob]
        key_end = 21 + content[20]
        pointed = content[:key_end] + struct.pack("<IQ", size, blobs_at[blob]) + content[key_end + 12 :]
        writer.tables[number - 1][place : place + len(content)] = crc(pointed, 12)
    objects = [(2, place, PAGE) for place in tables_at]
    objects += [(3, place, room) for place, (_, room) in zip(blobs_at, blobs, strict=True)]
    image = b"".join(header(sequence, version, log_at).ljust(PAGE, b"\0") for sequence in sequences)
    image += b"".join(
        directory(objects[number * (objects_at_once - 1) :][: objects_at_once - 1], objects_at_once, number, directories)
        for number in range(directories)
    )
    image += b"".join(map(bytes, writer.tables))
    image += b"".join(blob.ljust(room, b"\0") for blob, (_, room) in zip(writer.blobs, blobs, strict=True))
    return image + log(replay or {})


def header(sequence: int, version: int, log_at: int) -> bytes:
    return crc(struct.pack("<IIHIIIIQQI", 0x01282014, 0, sequence, version, 0, 0, PAGE, log_at, LOG_BYTES, PAGE), 4)


def directory(objects: list[tuple[int, int, int]], room: int, number: int, directories: int) -> bytes:
    entries = [crc(struct.pack("<BIQIB", kind, 0, place, size, 1), 1) for kind, place, size in objects]
    entries += [crc(bytes(18), 1)] * (room - 1 - len(entries))
    more = number + 1 < directories
    entries.append(crc(struct.pack("<BIQIB", 1, 0, (3 + number) * PAGE, PAGE, 1) if more else bytes(18), 1))
    return (struct.pack("<II", 0x01110001, room) + b"".join(entries)).ljust(PAGE, b"\0")


def log(changes: Mapping[int, bytes]) -> bytes:
    head = crc(struct.pack("<IIIBIBQII", 0x01110003, 0, len(changes), 0, 145, 0, 0, 0, 0), 4)
    at, content = PAGE, b""
    for place, data in changes.items():
        head += crc(struct.pack("<QIQII", place, len(data), at, 0, zlib.crc32(data)), 20)
        content, at = content + data, at + len(data)
    return (head.ljust(PAGE, b"\0") + content).ljust(LOG_BYTES, b"\0")


# ── the machine: the keys that Hyper-V writes ────────────────────────────────────────────────────────────────────────


def drive(path: str, kind: str = "VHD", **more: Any) -> Tree:
    if kind != "VHD":
        return {"pathname": path, "type": kind, **more}
    return {"type": kind, "pathname": path, "iops_limit": 0, "persistent_reservations_supported": False, **more}


def ethernet(mac: str = "00-15-5D-01-07-DC", **more: Any) -> Tree:
    return {
        "VDEVVersion": 768,
        "FriendlyName": "Network Adapter",
        "MacAddress": mac,
        "MacAddressIsStatic": False,
        "IsConnected": True,
        "SwitchName": "438B7B13-6180-4155-B7BF-08709CCF234D",
        "Connection": {"PoolId": "", "AltSwitchName": "External Switch"},
        **more,
    }


def configuration(
    disks: Mapping[str, str],
    *,
    generation: int = 1,
    name: str = "web",
    memory_mib: int = 1024,
    processors: int = 2,
    adapters: tuple[Tree, ...] | None = None,
    drives: Mapping[str, Tree] | None = None,
    devices: tuple[tuple[str, str, Tree], ...] = (),
    changes: Tree | None = None,
) -> Tree:
    """The tree of a machine. `disks`: a Windows path by `ide0:0` or `scsi0:1`; `drives` are drives of any other sort by the
    same. `devices`: (type, name, keys) of further ones. `changes` are laid over the whole, key by key."""
    placed = {key: drive(path) for key, path in disks.items()} | dict(drives or {})
    found: list[tuple[str, str, str, Tree]] = []
    if generation == 1:
        ide = {f"controller{number}": _drives(placed, f"ide{number}", ("NONE", "NONE")) for number in (0, 1)}
        found.append((IDE, IDE, "Microsoft Emulated IDE Controller", {**ide, "VDEVVersion": 1792}))
    scsi = sorted({int(key[4:].split(":")[0]) for key in placed if key.startswith("scsi")}) or [0]
    for number in scsi:
        keys = {"ChannelInstanceGuid": "{7D6F884F-489B-48EB-991E-E04EA1219D12}", "VDEVVersion": 512}
        inner = _drives(placed, f"scsi{number}", ())
        instance = str(UUID(int=0x73E0F0C5 << 96 | number))
        found.append((SCSI, instance, "Synthetic SCSI Controller", {**keys, **({"controller0": inner} if inner else {})}))
    for number, keys in enumerate((ethernet(),) if adapters is None else adapters):
        found.append((ETHERNET, str(UUID(int=0x1BC9500E << 96 | number)), "Synthetic Ethernet Port", keys))
    for number, (kind, device_name, keys) in enumerate(devices):
        found.append((kind, str(UUID(int=0xDDA << 96 | number)), device_name, keys))
    manifest: Tree = {"version": 512, "size": len(found) + 1}
    for number, (kind, instance, device_name, _) in enumerate([(BIOS, BIOS, "Microsoft Virtual BIOS", {}), *found], 1):
        manifest[f"vdev{number:03}"] = {"device": kind, "instance": instance, "name": device_name, "flags": 1}
    boot = ("Optical", "HardDrive", "Network", "Floppy")
    tree: Tree = {
        f"_{BIOS}_": {
            "bios_guid": f"{{{BIOS_GUID}}}",
            "bios_serial_number": BIOS_SERIAL,
            "boot": {f"device{number}": one for number, one in enumerate(boot)},
            "secure_boot_enabled": generation == 2,
            "secure_boot_template_id": LINUX_TEMPLATE if generation == 2 else NO_TEMPLATE,
            "VDEVVersion": 2048,
        },
        **{f"_{instance}_": keys for _, instance, _, keys in found},
        "global_settings": {"disk_merge_pending": False, "snapshots": {"enable_automatic": False, "list": {"size": 0}}},
        "manifest": manifest,
        "properties": {
            "global_id": MACHINE,
            "name": name,
            "notes": "",
            "subtype": generation - 1,
            "type_id": "Virtual Machines",
            "version": 2304,
            "creation_time": bytes.fromhex("a76e45669e97d701"),
        },
        "settings": {
            "memory": {
                "bank": {"dynamic_memory_enabled": False, "limit": 1 << 20, "reservation": 512, "size": memory_mib},
            },
            "processors": {
                "count": processors,
                "vnuma": {"count_per_node": {"max": 4}, "node_per_socket": {"max": 1}},
            },
        },
    }
    return {"configuration": laid_over(tree, changes or {})}


def _drives(placed: Mapping[str, Tree], controller: str, absent: tuple[str, ...]) -> Tree:
    inner = {f"drive{number}": drive("", kind) for number, kind in enumerate(absent)}
    return inner | {f"drive{key.split(':')[1]}": one for key, one in placed.items() if key.split(":")[0] == controller}


def laid_over(tree: Tree, changes: Tree) -> Tree:
    both = {key: value for key, value in changes.items() if isinstance(value, dict) and isinstance(tree.get(key), dict)}
    return tree | changes | {key: laid_over(tree[key], value) for key, value in both.items()}


def checkpoint(tree: Tree, name: str = "before the update", identity: str = CHECKPOINT) -> Tree:
    properties = {"global_id": identity, "name": name, "type_id": "Snapshots"}
    return {"configuration": laid_over(tree["configuration"], {"properties": properties})}


# ── the export: a folder ─────────────────────────────────────────────────────────────────────────────────────────────


def export(folder: Path, disks: Mapping[str, Path], *, old: bool = False, **machine: Any) -> Path:
    """An export in `folder`, with the given disk files (.vhdx, .avhdx, .vhd) moved into it, by their places: `ide0:0` and on
    for a machine of generation 1, `scsi0:0` and on for either. `old`: Windows Server 2012 R2's .xml in place of the .vmcx. The
    rest goes to `configuration`. Returns the folder, which is what is imported."""
    held = folder / "Virtual Hard Disks"
    held.mkdir(parents=True)
    for file in disks.values():
        shutil.move(file, held / file.name)
    tree = configuration({key: f"D:\\VMs\\Virtual Hard Disks\\{file.name}" for key, file in disks.items()}, **machine)
    return described(folder, tree, old=old)


def described(folder: Path, tree: Tree, *, old: bool = False) -> Path:
    """The configuration of a machine that is off, in its folder."""
    inner = folder / "Virtual Machines"
    inner.mkdir(parents=True, exist_ok=True)
    (folder / "Snapshots").mkdir(exist_ok=True)
    if old:
        (inner / f"{MACHINE}.xml").write_bytes(xml(tree))
    else:
        (inner / f"{MACHINE}.vmcx").write_bytes(storage(tree))
        (inner / f"{MACHINE}.vmrs").write_bytes(storage(runtime()))
        (inner / f"{MACHINE}.vmgs").write_bytes(b"GUESTRTS".ljust(PAGE, b"\0"))
    return folder


def runtime(*, saved: bool = False) -> Tree:
    """What a .vmrs holds; `saved`: the state of a machine that was suspended, with a mebibyte of its memory."""
    tree: Tree = {"configuration": {"properties": {"version": 2304}, f"_{IDE}_": {"VDEVVersion": 1792}}}
    if saved:
        state = {"partition_state": bytes(range(256)) * 40}
        tree["savedstate"] = {"VmVersion": 2304, "type": "Normal", "savedVM": state, "RamBlock0": bytes(1 << 20)}
    return tree


def xml(tree: Tree) -> bytes:
    """As Windows Server 2012 R2 writes it: UTF-16 with a byte order mark, each value with its type."""
    return ('<?xml version="1.0" encoding="UTF-16" standalone="yes"?>' + "".join(_elements(tree))).encode("utf-16")


def _elements(tree: Tree) -> Iterator[str]:
    for name, value in tree.items():
        match value:
            case dict():
                yield f"<{name}>{''.join(_elements(value))}</{name}>"
            case bool():
                yield f'<{name} type="bool">{value}</{name}>'
            case int():
                yield f'<{name} type="integer">{value}</{name}>'
            case bytes():
                yield f'<{name} type="bytes">{base64.b64encode(value).decode()}</{name}>'
            case _:
                yield f'<{name} type="string">{escape(value)}</{name}>'
