"""UEFI variables in XenServer's form, in `VM.NVRAM` under «EFI-variables»: base64 of varstored's output (xapi-project/
varstored: xapidb-lib.c, include/serialize.h). No I/O.

    «VARS» │ version 1 │ how many │ bytes of them │ each: name, data, vendor, attributes, when, digest of who signed it

Numbers are little-endian; lengths have 8 bytes. uefistored of XCP-ng 8.2 writes the same.
"""

import base64
import binascii
import struct
from typing import Final
from uuid import UUID

from synvirt.errors import Internal
from synvirt.machines.ovmf_store import UefiVariable, has_keys, store
from synvirt.machines.xenapi import Record, table, text, wants_secure_boot

FIELD: Final = "EFI-variables"
# varstored accepts files up to 128 KiB, names up to 4 KiB, and at most 64 KiB of variables in all.
BYTES_MAX: Final = 128 << 10
NAME_BYTES_MAX: Final = 4096
_HEAD: Final = struct.Struct("<4sIQQ")
_LENGTH: Final = struct.Struct("<Q")
_REST: Final = struct.Struct("<16sI16s32s")
_MAGIC, _VERSION = b"VARS", 1


def has_variables(vm: Record) -> bool:
    return bool(text(table(vm, "NVRAM"), FIELD))


def as_store(vm: Record) -> bytes | None:
    """The store in OVMF's form. None, where the VM has none, or where it uses Secure Boot but has no platform key yet, so that
    the caller enrols its own keys. Internal, where they are not in the known form."""
    if not has_variables(vm):
        return None
    found = variables(text(table(vm, "NVRAM"), FIELD))
    secure_boot = wants_secure_boot(vm)
    if secure_boot and not has_keys(found):
        return None
    return store(found, secure_boot=secure_boot)


def variables(encoded: str) -> list[UefiVariable]:
    """Internal."""
    if len(encoded) > BYTES_MAX * 4 // 3 + 4:
        raise Internal(f"the UEFI variables have over {BYTES_MAX} bytes: varstored writes no such")
    try:
        content = base64.b64decode(encoded, validate=True)
        return _variables(content)
    except (binascii.Error, struct.error, UnicodeDecodeError, ValueError) as error:
        raise Internal("the UEFI variables are not in the form that varstored writes") from error


def _variables(content: bytes) -> list[UefiVariable]:
    """ValueError, struct.error, UnicodeDecodeError."""
    magic, version, count, _ = _HEAD.unpack_from(content)
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(f"{magic!r}, version {version}")
    at, found = _HEAD.size, list[UefiVariable]()

    def taken(limit: int) -> bytes:
        nonlocal at
        (length,) = _LENGTH.unpack_from(content, at)
        start, at = at + _LENGTH.size, at + _LENGTH.size + length
        if not 0 < length <= limit or at > len(content):
            raise ValueError(f"{length} bytes at {start}")
        return content[start:at]

    while len(found) < count:
        name, data = taken(NAME_BYTES_MAX), taken(BYTES_MAX)
        vendor, attributes, written, _ = _REST.unpack_from(content, at)
        at += _REST.size
        spelt = name.decode("utf-16-le").rstrip("\0")
        if not spelt or "\0" in spelt:
            raise ValueError("a name of nothing")
        found.append(UefiVariable(UUID(bytes_le=vendor), spelt, attributes, data, written))
    if at != len(content):
        raise ValueError(f"{len(content) - at} bytes more")
    return found
