"""The footers of a repository's packs, in a SQLite file of this host, so that each is fetched once.

It is a cache. A pack never changes under its name, so a copy stays right. Each copy has its hash, so a changed one is noticed.
Where the file is missing, damaged or cannot be written, footers are read from the packs.
"""

import contextlib
import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from synvirt.errors import RepositoryDamaged
from synvirt.repository import packs
from synvirt.repository.folder import Folder
from synvirt.sizes import MIB

# The size of footers in memory: some 10 KiB for each pack of 64 MiB, so that a disk's next chunks are found without a query.
HELD_BYTES = 8 * MIB
# Up to this many are queried one by one; for more, the whole file is read.
_FEW = 100
_BUSY_S = 10.0

_log = logging.getLogger("synvirt.backups")  # structlog would load rich into each worker


class Footers:
    """Not safe from several threads: the index has its lock. `path` None: a nameless file that ends with the process."""

    def __init__(self, folder: Folder, path: Path | None = None) -> None:
        self._folder = folder
        self._db = _opened(path)
        self._held: OrderedDict[str, bytes] = OrderedDict()
        self._held_bytes = 0

    def of(self, pack: str, size_bytes: int) -> bytes:
        """The entries of a pack of that size, in their stored form. RepositoryDamaged."""
        held = self._held.get(pack)
        if held is not None:
            self._held.move_to_end(pack)
            return held
        row = next(self._rows("SELECT size, tail FROM footers WHERE pack = ?", pack), None)
        footer = None if row is None else _checked(pack, size_bytes, *row)
        if footer is None:
            footer = self._fetched(pack, size_bytes)
        self._hold(pack, footer)
        return footer

    def all(self, sizes: dict[str, int], unreadable: dict[str, str]) -> Iterator[tuple[str, bytes]]:
        """The entries of each pack in `sizes`. For damaged packs it puts the reason into `unreadable`. The last are held, so
        that those of a small repository are not queried again."""
        known = set()
        for pack, size_bytes, tail in self._cached(sizes):
            if pack in sizes and (footer := _checked(pack, sizes[pack], size_bytes, tail)) is not None:
                known.add(pack)
                self._hold(pack, footer)
                yield pack, footer
        for pack in sorted(sizes.keys() - known):
            try:
                footer = self._fetched(pack, sizes[pack])
            except RepositoryDamaged as error:
                unreadable[pack] = error.detail
                continue
            self._hold(pack, footer)
            yield pack, footer

    def _cached(self, sizes: dict[str, int]) -> Iterator[tuple]:  # type: ignore[type-arg]
        """At least the cached rows of these packs: if there are many, all rows."""
        if len(sizes) > _FEW:
            yield from self._rows("SELECT pack, size, tail FROM footers")
            return
        for pack in sizes:
            yield from self._rows("SELECT pack, size, tail FROM footers WHERE pack = ?", pack)

    def keep(self, pack: str, size_bytes: int, tail: bytes) -> None:
        self._write("INSERT OR REPLACE INTO footers (pack, size, tail) VALUES (?, ?, ?)", pack, size_bytes, tail)

    def forget(self, pack: str) -> None:
        """Removes the copy of a pack's footer: the pack is gone."""
        self._held_bytes -= len(self._held.pop(pack, b""))
        self._write("DELETE FROM footers WHERE pack = ?", pack)

    def close(self) -> None:
        """Closes the file. It may be called twice."""
        if self._db is not None:
            self._db.close()
            self._db = None

    def _fetched(self, pack: str, size_bytes: int) -> bytes:
        tail = packs.read_tail(self._folder, pack, size_bytes)
        self.keep(pack, size_bytes, tail)
        return packs.entries_in(tail)

    def _hold(self, pack: str, footer: bytes) -> None:
        self._held_bytes -= len(self._held.pop(pack, b""))
        self._held[pack] = footer
        self._held_bytes += len(footer)
        while self._held_bytes > HELD_BYTES and len(self._held) > 1:
            self._held_bytes -= len(self._held.popitem(last=False)[1])

    def _rows(self, text: str, *values: object) -> Iterator[tuple]:  # type: ignore[type-arg]
        """None, where the file cannot be read: the packs have the same data."""
        if self._db is not None:
            try:
                yield from self._db.execute(text, values)
            except sqlite3.Error as error:
                self._give_up(error)

    def _write(self, text: str, *values: object) -> None:
        if self._db is not None:
            try:
                self._db.execute(text, values)
            except sqlite3.Error as error:
                self._give_up(error)

    def _give_up(self, error: sqlite3.Error) -> None:
        _log.warning("the cache of a repository's footers is not used: %s", error)
        self.close()


def _checked(pack: str, size_bytes: int, cached_bytes: int, tail: bytes) -> bytes | None:
    """None, where the pack has another size than before, or the cache has changed."""
    if cached_bytes != size_bytes:
        return None
    try:
        return packs.footer_of(pack, size_bytes, tail)
    except RepositoryDamaged:
        return None


def _opened(path: Path | None) -> sqlite3.Connection | None:
    for again in (True, False):
        try:
            return _connected(path)
        except (sqlite3.Error, OSError) as error:
            _log.warning("the cache of a repository's footers is made again: %s", error)
            if path is None or not again:
                return None
            for name in (path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")):
                with contextlib.suppress(OSError):
                    name.unlink(missing_ok=True)
    return None


def _connected(path: Path | None) -> sqlite3.Connection:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    db = sqlite3.connect("" if path is None else path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
    try:
        if path is not None:
            db.execute("PRAGMA journal_mode = WAL")
        # A power cut may destroy the latest writes, or more: then the file is made again.
        db.execute("PRAGMA synchronous = OFF")
        db.execute("CREATE TABLE IF NOT EXISTS footers (pack TEXT PRIMARY KEY, size INTEGER NOT NULL, tail BLOB NOT NULL)")
        db.execute("SELECT count(*) FROM footers").fetchone()
    except sqlite3.Error:
        db.close()
        raise
    return db
