"""The ledger of a receipt, `HEX  NUMBER` for each block of 4 MiB (see proof/bag.py): its rows, in any file.

It imports little, as a worker reads an order that names a ledger.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from synvirt.disks.checking.block_hashes import blocks_of, zero_digest
from synvirt.disks.checking.ledger import BLOCK_BYTES, Ledger, Row
from synvirt.errors import MalformedArchive

# An honest line has fewer than 90.
LINE_BYTES: Final = 256
_ROW = re.compile(rb"([0-9a-f]{64})  (0|[1-9][0-9]{0,17})\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSpec:
    """The ledger of one disk: `length` bytes from `offset` of the file at `path`. `sha256`: of these bytes, as signed."""

    path: str
    offset: int
    length: int
    sha256: str
    disk: str
    size_bytes: int


def read_ledger(spec: LedgerSpec) -> Ledger:
    """MalformedArchive, where it is not as it was signed."""
    name = f"the receipt's ledger of {spec.disk}"
    hashed = hashlib.sha256()

    def lines() -> Iterator[bytes]:
        left = spec.length
        with Path(spec.path).open("rb") as file:
            file.seek(spec.offset)
            while left and (line := file.readline(min(left, LINE_BYTES))):
                hashed.update(line)
                left -= len(line)
                yield line

    try:
        ledger = Ledger(spec.disk, spec.size_bytes, rows_of(lines(), name, spec.size_bytes))
    except OSError as error:
        raise MalformedArchive(f"{name} cannot be read: {error.strerror}") from error
    if hashed.hexdigest() != spec.sha256:
        raise MalformedArchive(f"{name} is not what its statement says: its SHA-256 differs")
    return ledger


def rows_of(lines: Iterable[bytes], name: str, size: int) -> Iterator[Row]:
    """Its rows for a disk of `size` bytes, block by block. MalformedArchive says which line is wrong."""
    number, count = 0, blocks_of(size)
    for line in lines:
        row = _ROW.fullmatch(line)
        if row is None or int(row[2]) != number or number >= count:
            raise MalformedArchive(f"{name}, line {number + 1} is not the hash of block {number}")
        digest, start = bytes.fromhex(row[1].decode()), number * BLOCK_BYTES
        length = min(BLOCK_BYTES, size - start)
        yield Row(start, length, None if digest == zero_digest(length) else digest)
        number += 1
    if number != count:
        raise MalformedArchive(f"{name} has {number} hashes, and the volume {count} blocks")
