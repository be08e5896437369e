"""UEFI variables in OVMF's form: a whole variable store, made from variables of another firmware.

    firmware volume │ variable store: variables, then erased flash │ event log │ working block │ spare block

edk2: OvmfPkg/VarStore.fdf.inc (the flash of 4 MiB), MdeModulePkg/Include/Guid/VariableFormat.h, the authenticated form;
UEFI 2.10, sections 3.3 (global variables) and 8.2 (attributes). No I/O.
"""

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple
from uuid import UUID

from synvirt.errors import Internal

# From OvmfPkg/VarStore.fdf.inc for a flash of 4 MiB. The store's size is the volume's first part without its header.
STORE_BYTES: Final = 0x84000
_VARIABLES_BYTES: Final = 0x40000
_BLOCK_BYTES: Final = 0x1000
_WORKING_AT: Final = 0x41000
_ERASED: Final = b"\xff"

_VOLUME_HEADER: Final = struct.Struct("<16s16sQ4sIHHHBBIIII")
_STORE_HEADER: Final = struct.Struct("<16sIBBHI")
_WORKING_HEADER: Final = struct.Struct("<16s4sIQ")
_VARIABLE_HEADER: Final = struct.Struct("<HBBIQ16sIII16s")
_VOLUME_ATTRIBUTES: Final = 0x0004_FEFF
_FORMATTED, _HEALTHY = 0x5A, 0xFE
_STARTS: Final = 0x55AA
# Header and data are complete, and the variable is not deleted; the bit of a deleted one is cleared.
_ADDED, _DELETED = 0x3F, 0xFD
# Of the volume's header: its own length.
_LENGTH_AT: Final = 48

NON_VOLATILE, AUTHENTICATED_OLD, AUTHENTICATED_BY_TIME = 0x01, 0x10, 0x20
_NON_VOLATILE_AND_BOOT: Final = 0x03
# Appending is an attribute of a call, not of a variable.
_ATTRIBUTES_KEPT: Final = 0x0F | AUTHENTICATED_BY_TIME

GLOBAL: Final = UUID("8be4df61-93ca-11d2-aa0d-00e098032b8c")
SECURITY: Final = UUID("d719b2cb-3d3a-4596-a3bc-dad00e67656f")
_SYSTEM_VOLUME: Final = UUID("fff12b8d-7696-4c8b-a985-2747075b4f50")
_AUTHENTICATED_STORE: Final = UUID("aaf32c78-947b-439a-a180-2e144ec37792")
_WORKING_BLOCK: Final = UUID("9e58292b-7c68-497d-a0ce-6500fd9f1b95")
_SECURE_BOOT_ENABLE: Final = UUID("f0a30bc7-af08-4556-99c4-001009c93a44")
# A firmware's notes on itself and on its hardware: useless or harmful to another firmware.
_ITS_OWN: Final = frozenset(
    {
        UUID("4c19049f-4137-4dd3-9c10-8b97a83ffdfa"),  # MemoryTypeInformation
        UUID("eb704011-1402-11d3-8e77-00a0c969723b"),  # MTC, a counter of its starts
        UUID("04b37fe8-f6ae-480b-bdd5-37d98c5e89aa"),  # VarErrorFlag
        UUID("c076ec0c-7028-4399-a072-71ee5c448b9f"),  # CustomMode
        UUID("9073e4e0-60ec-4b6e-9903-4c223c260f3c"),  # VendorKeysNv
        UUID("d9bee56e-75dc-49d9-b4d7-b534210f637a"),  # certdb
        UUID("e20939be-32d4-41be-a150-897f85d49829"),  # MemoryOverwriteRequestControl
        UUID("bb983ccf-151d-40e1-a07b-4a17be168292"),  # … and its lock
        _SECURE_BOOT_ENABLE,  # we write it, by the machine's own setting
    }
)
# Consoles by their place in the other machine's hardware.
_ITS_OWN_GLOBALS: Final = frozenset({"ConIn", "ConOut", "ErrOut", "ConInDev", "ConOutDev", "ErrOutDev"})
_KEYS: Final = frozenset({(GLOBAL, "PK"), (GLOBAL, "KEK"), *((SECURITY, name) for name in ("db", "dbx", "dbt", "dbr"))})


class UefiVariable(NamedTuple):
    """`written`: an EFI_TIME of 16 bytes, zeros where the variable is not signed."""

    vendor: UUID
    name: str
    attributes: int
    data: bytes
    written: bytes = bytes(16)


def carried(variables: Iterable[UefiVariable]) -> list[UefiVariable]:
    """The variables that mean the same here: boot entries, keys, data of loaders and guests. The others are the firmware's
    notes on itself, or belong to their first signer, which OVMF notes in a form of its own."""
    found: dict[tuple[UUID, str], UefiVariable] = {}
    for one in variables:
        known = (one.vendor, one.name)
        signed = one.attributes & (AUTHENTICATED_OLD | AUTHENTICATED_BY_TIME)
        notes = one.vendor in _ITS_OWN or (one.vendor == GLOBAL and one.name in _ITS_OWN_GLOBALS)
        if one.attributes & NON_VOLATILE and not notes and (not signed or known in _KEYS):
            found.setdefault(known, one)
    return list(found.values())


def has_keys(variables: Iterable[UefiVariable]) -> bool:
    """Whether there is a platform key. Without one Secure Boot is off, whatever the other keys are."""
    return any((one.vendor, one.name) == (GLOBAL, "PK") and one.data for one in variables)


def store(variables: Iterable[UefiVariable], *, secure_boot: bool) -> bytes:
    """A whole store with the `carried` variables, and with Secure Boot on or off as it was: firmware that finds keys would turn
    it on. Internal, when they do not fit."""
    kept = carried(variables)
    if has_keys(kept):
        enabled = b"\1" if secure_boot else b"\0"
        kept.append(UefiVariable(_SECURE_BOOT_ENABLE, "SecureBootEnable", _NON_VOLATILE_AND_BOOT, enabled))
    content = bytearray(_ERASED * STORE_BYTES)
    head = _volume_header() + _STORE_HEADER.pack(
        _AUTHENTICATED_STORE.bytes_le, _VARIABLES_BYTES - _VOLUME_HEADER.size, _FORMATTED, _HEALTHY, 0, 0
    )
    written = head + b"".join(map(_written, kept))
    if len(written) > _VARIABLES_BYTES:
        raise Internal(f"{len(kept)} UEFI variables take {len(written)} bytes; OVMF keeps {_VARIABLES_BYTES}")
    content[: len(written)] = written
    # Its checksum is that of an empty block: edk2 has it as a constant, too.
    working = _WORKING_HEADER.pack(
        _WORKING_BLOCK.bytes_le, bytes.fromhex("2caf2c64"), 0xFFFF_FFFE, _BLOCK_BYTES - _WORKING_HEADER.size
    )
    content[_WORKING_AT : _WORKING_AT + len(working)] = working
    return bytes(content)


def added(store: bytes, variables: Iterable[UefiVariable]) -> bytes:
    """The store with these variables too, in place of those of the same names. Internal, where it is no store in OVMF's form,
    or they do not fit."""
    volume_bytes = int.from_bytes(store[_LENGTH_AT : _LENGTH_AT + 2], "little")
    first = volume_bytes + _STORE_HEADER.size
    if store[volume_bytes : volume_bytes + 16] != _AUTHENTICATED_STORE.bytes_le or len(store) < first:
        raise Internal("it is no store of UEFI variables in OVMF's form")
    end = min(volume_bytes + int.from_bytes(store[volume_bytes + 16 : volume_bytes + 20], "little"), len(store))
    content, at, new = bytearray(store), first, list(variables)
    names = {(one.vendor.bytes_le, one.name) for one in new}
    while at + _VARIABLE_HEADER.size <= end and content[at : at + 2] == _STARTS.to_bytes(2, "little"):
        _, state, *_, name_bytes, data_bytes, vendor = _VARIABLE_HEADER.unpack_from(content, at)
        name = content[at + _VARIABLE_HEADER.size :][:name_bytes].decode("utf-16-le", "replace").rstrip("\0")
        if (vendor, name) in names:
            content[at + 2] = state & _DELETED
        at += _VARIABLE_HEADER.size + name_bytes + data_bytes
        at += -at % 4
    written = b"".join(map(_written, new))
    if at + len(written) > end:
        raise Internal(f"{len(new)} UEFI variables take {len(written)} bytes; {max(end - at, 0)} are free")
    content[at : at + len(written)] = written
    return bytes(content)


def _volume_header() -> bytes:
    def packed(checksum: int) -> bytes:
        return _VOLUME_HEADER.pack(
            bytes(16), _SYSTEM_VOLUME.bytes_le, STORE_BYTES, b"_FVH", _VOLUME_ATTRIBUTES, _VOLUME_HEADER.size, checksum,
            0, 0, 2, STORE_BYTES // _BLOCK_BYTES, _BLOCK_BYTES, 0, 0,
        )  # fmt: skip

    # The sum of all its 16-bit words is zero.
    return packed(-sum(struct.unpack(f"<{_VOLUME_HEADER.size // 2}H", packed(0))) & 0xFFFF)


def _written(variable: UefiVariable) -> bytes:
    name = variable.name.encode("utf-16-le") + b"\0\0"
    header = _VARIABLE_HEADER.pack(
        _STARTS, _ADDED, 0, variable.attributes & _ATTRIBUTES_KEPT, 0, variable.written, 0, len(name), len(variable.data),
        variable.vendor.bytes_le,
    )  # fmt: skip
    entry = header + name + variable.data
    return entry + _ERASED * (-len(entry) % 4)
