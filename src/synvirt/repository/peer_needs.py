"""Finds the packs that the restore points of a folder need, without the key: pages are stored in the clear.

A pack with something that a point needs may be deleted only if another pack has the same frame, which is read and hashed. So a
pack whose footer only claims to have a chunk does not allow to delete the pack that has it.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from synvirt.errors import BackupImmutable, RepositoryDamaged
from synvirt.repository import manifest as manifests
from synvirt.repository import packs
from synvirt.repository.folder import Folder
from synvirt.repository.index import Index, Words, prefixes_of
from synvirt.repository.manifest import NONE


class Needs:
    """Not safe from several threads. `cache`: a file for copies of footers. `reading`: parses manifests."""

    def __init__(self, folder: Folder, cache: Path | None = None, *, reading: manifests.Reading = manifests.HERE) -> None:
        self._folder, self._index, self._reading = folder, Index(folder, cache), reading
        self._points: frozenset[str] | None = None
        # By the first 8 bytes of the names; what is taken for needed by mistake stays.
        self._needed: Words = np.empty(0, np.uint64)

    def check_unneeded(self, pack: str) -> None:
        """BackupImmutable: a point needs it, or this is not known."""
        try:
            self._look()
            entries = self._index.entries(pack)
            needed = np.isin(prefixes_of(b"".join(entry.name for entry in entries)), self._needed).tolist()
            wanted = [entry for entry, is_needed in zip(entries, needed, strict=True) if is_needed]
            kept = next((entry for entry in wanted if not self._lies_elsewhere(pack, entry)), None)
        except RepositoryDamaged as error:
            raise BackupImmutable(f"nothing is removed while something cannot be read: {error.detail}") from error
        if kept is not None:
            raise BackupImmutable(f"{pack} has what restore points need that are kept here: chunk {kept.name.hex()[:16]}")

    def _look(self) -> None:
        unreadable = self._index.update({one.name: one.size_bytes for one in self._folder.entries(packs.FOLDER)})
        if unreadable:
            raise RepositoryDamaged(next(iter(unreadable.values())))
        points = frozenset(
            entry.name for entry in self._folder.entries(manifests.FOLDER) if entry.name.endswith(manifests.SUFFIX)
        )
        if points == self._points:
            return
        pages = {*self._pages(points)} - {NONE}
        found = [prefixes_of(b"".join(sorted(pages)))]
        for page in pages:
            found += [prefixes_of(content) for content in self._contents(page)]
        self._needed = np.unique(np.concatenate(found))
        self._points = points

    def _pages(self, points: Iterable[str]) -> Iterator[bytes]:
        unread = (
            manifests.unread(point.removesuffix(manifests.SUFFIX), self._folder.read(f"{manifests.FOLDER}/{point}"))
            for point in sorted(points)
        )
        for batch in manifests.in_batches(unread):
            for found in self._reading.shown(batch):
                for disk in manifests.sound(found).disks:
                    yield from map(bytes.fromhex, disk.pages)

    def _contents(self, page: bytes) -> Iterator[bytes]:
        """All contents with this name: only the owner can find out which one is the page."""
        places = [place for place in self._index.places(page) if place.entry.kind == packs.PAGE]
        if not places:
            raise RepositoryDamaged(f"page {page.hex()[:16]} of a restore point is in no pack")
        for place in places:
            content = packs.read_frame(self._folder, place.pack, place.entry)
            if len(content) != manifests.PAGE_BYTES:
                raise RepositoryDamaged(f"page {page.hex()[:16]} has {len(content)} bytes")
            yield content

    def _lies_elsewhere(self, pack: str, entry: packs.Entry) -> bool:
        for place in self._index.places(entry.name):
            if place.pack != pack and (place.entry.hash, place.entry.kind) == (entry.hash, entry.kind):
                packs.read_frame(self._folder, place.pack, place.entry)
                return True
        return False
