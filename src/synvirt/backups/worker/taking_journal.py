"""The chunks of a guest's disks that are named already, in a file of this host: an interrupted run need not read them again.

    record   disk's number (2 bytes), chunk's number (8), its name (32), check (8)

It is only a hint: a chunk counts as stored only if the repository has that name. `moment` identifies the guest's moment of the
names, and a disk's files what it was read from. The check includes both, so a record of another moment or of files that have
changed since, an incomplete one, and zeros that a power cut left do not count. Only the worker writes it.
"""

import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from blake3 import blake3

from synvirt.repository.keys import NAME_BYTES

_RECORD = struct.Struct(f"<HQ{NAME_BYTES}s")
_DISK = struct.Struct("<H")
_CHECK_BYTES = 8
RECORD_BYTES = _RECORD.size + _CHECK_BYTES
_READ_RECORDS = 1 << 14


class Journal:
    """Safe from several threads. A file that cannot be written does not stop the run: the next run only reads more."""

    def __init__(self, path: Path, moment: str) -> None:
        self._moment = moment
        self._keys: dict[int, bytes] = {}
        self._lock = threading.Lock()
        # By disk; they are checked when its files are known.
        self._records: dict[int, list[bytes]] = {}
        self._file: IO[bytes] | None = None
        try:
            self._file = path.open("a+b", buffering=0)
            for record in self._read():
                (disk,) = _DISK.unpack_from(record)
                self._records.setdefault(disk, []).append(record)
            # After the last complete record: an incomplete one would shift those that follow.
            self._file.truncate(self._file.seek(0, 2) // RECORD_BYTES * RECORD_BYTES)
        except OSError:
            self.close()

    def stored(self, disk: int, files: tuple[str, ...]) -> dict[int, bytes]:
        """The names by chunk, from the run before, if the disk's files are as they were for it (`disks.noted_files`). What is
        added later is of these files."""
        self._keys[disk] = blake3("\0".join((self._moment, *files)).encode(errors="surrogatepass")).digest()
        found = {}
        for record in self._records.pop(disk, ()):
            if record[_RECORD.size :] == self._check(record[: _RECORD.size]):
                _, number, name = _RECORD.unpack_from(record)
                found[number] = name
        return found

    def add(self, disk: int, number: int, name: bytes) -> None:
        """Notes that a chunk of a disk, of which `stored` was asked, is named. A file that cannot be written is closed: the
        journal is a hint only."""
        record = _RECORD.pack(disk, number, name)
        with self._lock:
            if self._file is None:
                return
            try:
                written = self._file.write(record + self._check(record))
            except OSError:
                written = 0
            if written != RECORD_BYTES:  # a full disk took a part: it would shift the records after it
                self.close()

    def close(self) -> None:
        """Closes the file; what is added later is not kept. It may be called twice."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self) -> Iterator[bytes]:
        """The complete records."""
        assert self._file is not None
        self._file.seek(0)
        while content := self._file.read(RECORD_BYTES * _READ_RECORDS):
            for at in range(0, len(content) - RECORD_BYTES + 1, RECORD_BYTES):
                yield content[at : at + RECORD_BYTES]

    def _check(self, record: bytes) -> bytes:
        (disk,) = _DISK.unpack_from(record)
        return blake3(record, key=self._keys[disk]).digest(_CHECK_BYTES)
