"""A writing session in a repository: one of many writers, with no locks between hosts.

Session(repository) ─▶ add(chunk) … add_page(…) ─▶ commit(manifest)
"""

import contextlib
import threading

from synvirt.errors import BackupConflict
from synvirt.repository import condemned, packs
from synvirt.repository import manifest as manifests
from synvirt.repository.folder import put
from synvirt.repository.manifest import NONE, PAGE_BYTES, Manifest
from synvirt.repository.repository import Repository


class Session:
    """The session of one run that writes. `add` may be called from any thread; its data is durable once `commit` returns.

    Chunks that the repository has are not written again. If a pack that the session relies on is condemned meanwhile, the
    commit is refused. A pack that is condemned later stays until a collection has read the manifest, which exists by then
    (`garbage.py`).
    """

    def __init__(self, repository: Repository) -> None:
        """Reads the newest index. RepositoryDamaged, also where a list of condemned packs is."""
        repository.refresh()
        condemned.packs_of(repository.folder)
        self._repository, self._keys = repository, repository.keys
        self._pack = packs.Pack()
        # The memory of the last pack that was stored, if the present one does not use it.
        self._spare: memoryview | None = None
        self._mine: set[bytes] = set()
        self._used: set[str] = set()
        self._lock, self._putting = threading.Lock(), threading.Lock()
        # By length, once a chunk of it is added.
        self._zero_names: dict[int, bytes] = {}
        # Bytes of disks that were new to the repository, and the bytes of their packs.
        self.new_bytes = self.stored_bytes = 0

    def add(self, chunk: bytes | bytearray | memoryview) -> bytes:
        """The chunk's name, which is NONE for zeros."""
        name = self._keys.chunk_name(chunk)
        if name == self._zero_name(len(chunk)):
            return NONE
        if self._is_new(name):
            frame = self._keys.frame(name, chunk)
            self._append(name, packs.CHUNK, frame, len(chunk))
        return name

    def add_page(self, page: bytes) -> bytes:
        """Stores a page unless the repository has it, and gives its name (32 bytes)."""
        if page == bytes(PAGE_BYTES):
            return NONE
        name = self._keys.page_name(page)
        if self._is_new(name):
            self._append(name, packs.PAGE, page, len(page))
        return name

    def rely_on(self, name: bytes) -> bool:
        """Whether the repository has that chunk or page, and keeps it: the commit checks that it still does."""
        if name == NONE:
            return True
        with self._lock:
            place = self._repository.reusable(name)
            if place is not None:
                self._used.add(place.pack)
            return place is not None

    def _zero_name(self, length: int) -> bytes:
        if length not in self._zero_names:
            self._zero_names[length] = self._keys.chunk_name(bytes(length))
        return self._zero_names[length]

    def _is_new(self, name: bytes) -> bool:
        """True only for the first caller, who then adds it."""
        with self._lock:
            if name in self._mine:
                return False
            place = self._repository.reusable(name)
            if place is not None:
                self._used.add(place.pack)
                return False
            self._mine.add(name)
            return True

    def _append(self, name: bytes, kind: int, frame: bytes | memoryview, length: int) -> None:
        full = None
        with contextlib.ExitStack() as putting:
            with self._lock:
                if self._pack.names and not self._pack.fits(len(frame)):
                    # The last pack must be stored before the next one is begun, so that there are never three in memory.
                    putting.enter_context(self._putting)
                    full = self._taken()
                self._pack.add(name, kind, frame, length)
                self.new_bytes += length
            if full is not None:
                self._put(full)

    def _taken(self) -> packs.Pack:
        """The present pack, to be stored. Another one takes its place, in the memory of the one before."""
        full, self._pack, self._spare = self._pack, packs.Pack(self._spare), None
        return full

    def _put(self, full: packs.Pack) -> None:
        name, content, tail = full.closed()
        put(self._repository.folder, f"{packs.FOLDER}/{name}", [content])
        self._repository.index.add(name, len(content), tail)
        # Not under _lock: a thread that waits for _putting holds that. Only one thread at a time is here, and a set is changed
        # atomically.
        self._used.add(name)
        self._mine.difference_update(full.names)  # they are in the index now
        self._spare = full.held
        self.stored_bytes += len(content)

    def commit(self, manifest: Manifest, sign: manifests.Sign = lambda digest: None) -> None:
        """The restore point exists when this returns. BackupConflict, where something that it relies on is being removed."""
        with self._putting:
            if self._pack.names:
                self._put(self._taken())
        folder = self._repository.folder
        # In this order: a collection deletes packs first, and then the list that condemned them.
        gone = condemned.packs_of(folder)
        missing = self._used - {entry.name for entry in folder.entries(packs.FOLDER)}
        if missing or self._used & gone:
            raise BackupConflict(
                "the repository's garbage was collected while the run went on, and took what the run relied on",
                hint="start the run again: it writes what is missing",
            )
        put(folder, manifests.file_name(manifest.shown.id), [manifests.written(manifest, self._keys, sign)])
