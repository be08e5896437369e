"""Numbers with units in exporters' spellings: «2048» «MegaBytes», «40» «byte * 2^30», «0.5» «GB».

DSP0004 annex C («programmatic units») is the standard; OVF 0.9 used the older CIM names, in which a MegaByte is 2^20 bytes. All
exporters that write names instead of powers mean the same.
"""

import re
from decimal import Decimal, InvalidOperation

from synvirt.errors import MalformedArchive

# The largest disk of any format here is 64 TiB; 2^60 leaves room, and keeps sums within a signed 64-bit number.
QUANTITY_MAX_BYTES = 1 << 60

_NAMES = {
    **dict.fromkeys(("byte", "bytes", "byte(s)", "b"), 0),
    **dict.fromkeys(("kilobyte", "kilobytes", "kbyte", "kbytes", "kibibyte", "kibibytes", "kb", "kib", "k"), 10),
    **dict.fromkeys(("megabyte", "megabytes", "mbyte", "mbytes", "mebibyte", "mebibytes", "mb", "mib", "m"), 20),
    **dict.fromkeys(("gigabyte", "gigabytes", "gbyte", "gbytes", "gibibyte", "gibibytes", "gb", "gib", "g"), 30),
    **dict.fromkeys(("terabyte", "terabytes", "tbyte", "tbytes", "tebibyte", "tebibytes", "tb", "tib", "t"), 40),
}
_POWER = re.compile(r"(\d{1,4})\s*\^\s*(\d{1,2})", re.ASCII)
_COUNT = re.compile(r"\d{1,18}", re.ASCII)
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,3})?)\s*([KMGT](?:i?B)?|B)", re.ASCII | re.IGNORECASE)
_NUMBER = re.compile(r"\d{1,20}(\.\d{1,9})?", re.ASCII)


def unit_bytes(units: str) -> int:
    """`byte * 2^20` and `MegaBytes` are 1,048,576. ValueError, where it is no unit of bytes."""
    factor = 1
    for term in units.lower().split("*"):
        spelled = term.strip()
        power = _POWER.fullmatch(spelled)
        if spelled in _NAMES:
            factor <<= _NAMES[spelled]
        elif power is not None:
            factor *= int(power[1]) ** int(power[2])
        elif _COUNT.fullmatch(spelled):
            factor *= int(spelled)
        else:
            raise ValueError(spelled)
        if not 0 < factor <= QUANTITY_MAX_BYTES:
            raise ValueError(units)
    return factor


def size_bytes(text: str) -> int:
    """A size in people's spelling: 4 GiB, 512M, 1.5TB (each step is 1024). ValueError, where it is no size."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(text)
    return int(Decimal(match[1]) * unit_bytes(match[2]))


def quantity_bytes(quantity: str, units: str, what: str) -> int:
    """`quantity` × `units` in bytes. MalformedArchive says of `what` the size is."""
    if not _NUMBER.fullmatch(quantity):
        raise MalformedArchive(f"{what}: {quantity[:40]!r} is not a size")
    try:
        size = int(Decimal(quantity) * unit_bytes(units))
    except (ValueError, InvalidOperation):
        raise MalformedArchive(f"{what}: {units[:60]!r} is not a unit of bytes") from None
    if size > QUANTITY_MAX_BYTES:
        raise MalformedArchive(f"{what}: {quantity} {units} is more than any disk or memory has")
    return size
