"""UEFI variables as varstored of XenServer writes them into `VM.NVRAM` (xapi-project/varstored, xapidb-lib.c)."""

import base64
import struct
from collections.abc import Iterable
from uuid import UUID

GLOBAL = UUID("8be4df61-93ca-11d2-aa0d-00e098032b8c")
NV_BS_RT, SIGNED = 7, 0x27

# Name, vendor, attributes, data.
Variable = tuple[str, UUID, int, bytes]


def blob(variables: Iterable[Variable], *, magic: bytes = b"VARS", version: int = 1) -> bytes:
    parts = []
    for name, vendor, attributes, data in variables:
        spelt = name.encode("utf-16-le")  # without the end that C's strings have
        parts.append(struct.pack("<Q", len(spelt)) + spelt + struct.pack("<Q", len(data)) + data)
        parts.append(vendor.bytes_le + struct.pack("<I", attributes) + bytes(16) + bytes(32))
    body = b"".join(parts)
    return magic + struct.pack("<IQQ", version, len(parts) // 2, len(body)) + body


def nvram(variables: Iterable[Variable]) -> dict[str, str]:
    return {"EFI-variables": base64.b64encode(blob(variables)).decode()}


def boot_entry(title: str, path: bytes, more: bytes = b"") -> bytes:
    """EFI_LOAD_OPTION (UEFI 2.10, 3.1.3) of a device path."""
    return struct.pack("<IH", 1, len(path)) + title.encode("utf-16-le") + b"\0\0" + path + more


def on_partition(number: int, start: int, sectors: int, partition: UUID, file: str) -> bytes:
    """HD(number,GPT,partition)/file: what guests' installers write."""
    hard_disk = struct.pack("<BBHIQQ16sBB", 4, 1, 42, number, start, sectors, partition.bytes_le, 2, 2)
    name = file.encode("utf-16-le") + b"\0\0"
    return hard_disk + struct.pack("<BBH", 4, 4, 4 + len(name)) + name + b"\x7f\xff\x04\0"


def of_xen() -> bytes:
    """PciRoot/Pci/VenHw: a disk as XenServer's firmware knows it, which is nowhere else."""
    root = struct.pack("<BBHII", 2, 1, 12, 0x0A0341D0, 0)
    vendor = UUID("3d3ca290-b9a5-11e3-b75d-b8ac6f7d65e6").bytes_le
    return root + struct.pack("<BBHBB", 1, 1, 6, 0, 3) + struct.pack("<BBH16s", 1, 4, 20, vendor) + b"\x7f\xff\x04\0"
