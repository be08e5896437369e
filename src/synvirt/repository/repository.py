"""A repository: packs and manifests in a folder, found by their content. docs/backup-format.md is the whole format.

A restore point exists from the moment its manifest has its name: its packs are durable by then. Nothing is ever changed in
place. In memory there is an index (index.py) of the packs' footers; a file of this host has copies of them.

    session() ─▶ add(chunk) … add_page(…) ─▶ commit(manifest)       one writer of many; no locks between hosts
    manifest(id) ─▶ chunk_names(disk) ─▶ read_chunk(name)           disk.py makes a DiskReader of it
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

from blake3 import blake3

from synvirt.errors import BackupConflict, BackupNotFound, RepositoryDamaged, RepositoryKeyWrong, SynvirtError
from synvirt.repository import key_change, packs
from synvirt.repository import manifest as manifests
from synvirt.repository.folder import UNFINISHED, Folder, put
from synvirt.repository.keys import CHUNK_BYTES, KeyRing, Keys
from synvirt.repository.manifest import NONE, PAGE_BYTES, PAGE_CHUNKS, DiskMap, Manifest, Shown, Unread
from synvirt.sizes import KIB, MIB

if TYPE_CHECKING:  # it loads numpy, which a service without a repository does not need
    from synvirt.repository.index import Place

Read = TypeVar("Read")

FORMAT = 1
HEADER = "repository"
# A header has some 300. A list of condemned packs has 70 for each pack of 64 MiB: this is for packs of 12 TiB.
HEADER_BYTES_MAX, CONDEMNED_BYTES_MAX = 64 * KIB, 16 * MIB
CONDEMNED_FOLDER = "condemned"
KEPT_SUFFIX = ".kept"
_LISTED_AGAIN = "remove it: what is not needed is listed again"
FOLDERS = (packs.FOLDER, manifests.FOLDER, CONDEMNED_FOLDER, key_change.FOLDER, UNFINISHED)


def create(folder: Folder, master: bytes) -> UUID:
    """Makes an empty repository in an empty folder, and gives its id. BackupConflict, where the folder has something in it."""
    if folder.entries(""):
        raise BackupConflict(
            "the folder is not empty", hint="name an empty one; or, to use a repository again, give its recovery key"
        )
    folder.make_folders(FOLDERS)
    repository_id = uuid4()
    line = json.dumps(
        {
            "format": FORMAT,
            "id": str(repository_id),
            "chunk_bytes": CHUNK_BYTES,
            "page_chunks": PAGE_CHUNKS,
            "names": "BLAKE3, keyed",
            "frames": "zstd, AES-256-GCM",
            "key_check": Keys(master).check,
        }
    ).encode()
    put(folder, HEADER, [line + b"\n" + blake3(line + b"\n").hexdigest().encode() + b"\n"])
    return repository_id


def change_key(folder: Folder, old: bytes, new: bytes) -> None:
    """Makes `new` the repository's key from now on; nothing is written with `old` any more. Idempotent. RepositoryKeyWrong:
    `old` is not its newest key. BackupConflict: another host changes it at this moment."""
    check = header_of(folder)["key_check"]  # first: where its file system is not mounted, nothing is made
    folder.make_folders(FOLDERS)
    try:
        key_change.masters(folder, check, new)
    except RepositoryKeyWrong:
        key_change.masters(folder, check, old)
        key_change.write(folder, old, new)
    # Of two hosts at least one sees the other's file, as each looks after it has written its own. With both keys, each host
    # would write points that the other cannot open.
    if key_change.rivals(folder, old, new):
        key_change.take_back(folder, new)
        raise BackupConflict("another host changes the repository's key at this moment", hint="wait a minute, and try again")


def header_of(folder: Folder) -> dict[str, Any]:
    """RepositoryDamaged, where there is no header, or not one of ours."""
    size = next((entry.size_bytes for entry in folder.entries("") if entry.name == HEADER), None)
    if size is not None and size > HEADER_BYTES_MAX:
        raise RepositoryDamaged(f"the file «{HEADER}» of the repository has {size} bytes")
    return header_in(folder.read(HEADER, 0, size))


def header_in(content: bytes) -> dict[str, Any]:
    """RepositoryDamaged."""
    line, _, rest = content.partition(b"\n")
    if rest != blake3(line + b"\n").hexdigest().encode() + b"\n":
        raise RepositoryDamaged(f"the file «{HEADER}» of the repository has changed")
    try:
        found: dict[str, Any] = json.loads(line)
        is_ours = bool(UUID(found["id"])) and isinstance(found["key_check"], str)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise RepositoryDamaged(f"the file «{HEADER}» of the repository was not made by SynVirt")
    if found.get("format") != FORMAT:
        raise RepositoryDamaged(f"the repository's format is {found.get('format')}, and this version reads {FORMAT}")
    return found


class Repository:
    """Safe from several threads. `unreadable`: packs with damaged footers, and why.

    `cache`: a file of this host for copies of the packs' footers, so that the next opening fetches only new ones.
    `reading`: parses manifests.
    """

    def __init__(
        self, folder: Folder, master: bytes, *, cache: Path | None = None, reading: manifests.Reading = manifests.HERE
    ) -> None:
        from synvirt.repository.index import Index

        header = header_of(folder)
        self.folder, self.keys = folder, KeyRing(key_change.masters(folder, header["key_check"], master))
        self.id = UUID(header["id"])
        self._reading = reading
        self.unreadable: dict[str, str] = {}
        self.index = Index(folder, cache)
        self._condemned: frozenset[str] = frozenset()
        # Packs that could not be read although the index is up to date; for a footer, the text of its error.
        self._unsound: set[str] = set()
        self._lock = threading.RLock()
        self.refresh()

    def close(self) -> None:
        """Nothing can be read from here on."""
        self.index.close()
        self.folder.close()

    # ── the index ────────────────────────────────────────────────────────────────────────────────────────────────────

    def refresh(self) -> None:
        """Updates the index with what others have written, condemned or removed."""
        with self._lock:
            there = {entry.name: entry.size_bytes for entry in self.folder.entries(packs.FOLDER)}
            with contextlib.suppress(RepositoryDamaged):  # an unreadable list stops writers, but not restores
                self._condemned = condemned_packs(self.folder)
            unreadable = self.index.update(there)
            if unreadable:  # a pack that a collection has deleted since it was listed cannot be read
                left = {entry.name for entry in self.folder.entries(packs.FOLDER)}
                unreadable = {name: why for name, why in unreadable.items() if name in left}
            self.unreadable = unreadable

    def places(self, name: bytes) -> "list[Place]":
        """Its places; packs that will not soon be removed come first. There are several if two hosts wrote it at once, or if
        somebody put another frame of that name there: only opening them shows which is right. They are in one order for all
        hosts: if two that collect at once kept different ones, each would remove what the other keeps."""
        return sorted(self.index.places(name), key=lambda place: (place.pack in self._condemned, place.pack))

    def place(self, name: bytes) -> "Place | None":
        """The first of its places whose frame opens."""
        found = self.places(name)
        if len(found) < 2:
            return found[0] if found else None
        return next((place for place in found if self._opens(name, place)), found[0])

    def is_sound(self, name: bytes) -> bool:
        """Whether its frame opens in at least one place."""
        return any(self._opens(name, place) for place in self.places(name))

    def _opens(self, name: bytes, place: "Place") -> bool:
        try:
            if place.entry.kind == packs.CHUNK:
                self._chunk(name, place, memoryview(bytearray(min(place.entry.content_length, CHUNK_BYTES))))
            else:
                self._page(name, place)
        except RepositoryDamaged:
            return False
        return True

    def _chunk(self, name: bytes, place: "Place", into: memoryview) -> None:
        """RepositoryDamaged, where it is not what was stored."""
        frame = packs.bytes_of_frame(self.folder, place.pack, place.entry)
        try:
            self.keys.content_into(name, frame, into)
        except RepositoryDamaged:
            # A frame that opens and has its name is right. If it does not open, its own hash shows a changed pack.
            packs.check_frame(place.pack, place.entry, frame)
            raise

    def _page(self, name: bytes, place: "Place") -> bytes:
        """RepositoryDamaged, where it is not what was stored."""
        frame = packs.read_frame(self.folder, place.pack, place.entry)
        if len(frame) != PAGE_BYTES or not self.keys.is_page(name, frame):
            raise RepositoryDamaged(f"page {name.hex()[:16]} is not the one that was stored")
        return frame

    def reusable(self, name: bytes) -> "Place | None":
        """Its place, if that will not soon be removed."""
        place = self.place(name)
        return None if place is None or place.pack in self._condemned else place

    def pack_sizes(self) -> dict[str, int]:
        return self.index.sizes()

    # ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def point_ids(self) -> list[UUID]:
        return [UUID(name) for name in _names(self.folder, manifests.SUFFIX)]

    def kept_ids(self) -> set[UUID]:
        """The points that nothing may remove."""
        return {UUID(name) for name in _names(self.folder, KEPT_SUFFIX)}

    def manifest(self, point_id: UUID, sha256: str | None = None) -> Manifest:
        """BackupNotFound, RepositoryDamaged, as of `unread`."""
        return self.parsed(self.unread(point_id, sha256))

    def parsed(self, unread: Unread) -> Manifest:
        """RepositoryDamaged."""
        return manifests.sound(self._reading.manifests([unread])[0])

    def unread(self, point_id: UUID, sha256: str | None = None) -> Unread:
        """Its manifest, decrypted and not parsed. `sha256`: its hash when its author was checked; None: any is accepted.
        BackupNotFound, RepositoryDamaged."""
        unread = self._opened(point_id, self._manifest_sizes(), self.keys)
        if sha256 not in (None, unread.sha256):
            raise RepositoryDamaged(
                f"restore point {point_id} is not the one whose author was checked: its manifest was replaced meanwhile",
                hint="somebody who can write to the repository did that: find out who, and verify the point before a restore",
            )
        return unread

    def read_all(self, point_ids: Iterable[UUID]) -> Iterator[tuple[UUID, tuple[Unread, Manifest] | SynvirtError]]:
        """Each point's manifest, or its error; in no order."""
        sizes, failed = self._manifest_sizes(), list[tuple[UUID, SynvirtError]]()

        def unread() -> Iterator[Unread]:
            for point_id in point_ids:
                try:
                    yield self._opened(point_id, sizes, self.keys)
                except SynvirtError as error:
                    failed.append((point_id, error))

        for batch in manifests.in_batches(unread()):
            for one, found in zip(batch, self._reading.manifests(batch), strict=True):
                yield UUID(one.point_id), found if isinstance(found, RepositoryDamaged) else (one, found)
        yield from failed

    def shown_all(self, point_ids: Iterable[UUID]) -> Iterator[Shown]:
        """The public parts of these points, in order. BackupNotFound, RepositoryDamaged: for any of them."""
        sizes = self._manifest_sizes()
        for batch in manifests.in_batches(self._opened(point_id, sizes, None) for point_id in point_ids):
            yield from map(manifests.sound, self._reading.shown(batch))

    def shown(self, point_id: UUID) -> Shown:
        """BackupNotFound, RepositoryDamaged."""
        return next(self.shown_all([point_id]))

    def is_current(self, point_id: UUID) -> bool:
        """Whether it was written with the present newest key. BackupNotFound."""
        try:
            self._opened(point_id, self._manifest_sizes(), self.keys.newest)
        except RepositoryDamaged:
            return False
        return True

    def _manifest_sizes(self) -> dict[str, int]:
        return {entry.name: entry.size_bytes for entry in self.folder.entries(manifests.FOLDER)}

    def _opened(self, point_id: UUID, sizes: dict[str, int], keys: Keys | KeyRing | None) -> Unread:
        name = f"{point_id}{manifests.SUFFIX}"
        if name not in sizes:
            raise BackupNotFound(f"restore point {point_id} is not in the repository")
        if sizes[name] > manifests.MANIFEST_BYTES_MAX:
            raise RepositoryDamaged(f"the manifest of restore point {point_id} has {sizes[name]} bytes")
        # Only up to the size seen: the file may have grown since.
        content = self.folder.read(manifests.file_name(point_id), 0, sizes[name])
        return manifests.unread(str(point_id), content, keys)

    def chunk_names(self, disk: DiskMap) -> bytes:
        """32 bytes per chunk, in the disk's order."""
        pages = b"".join(self.read_page(bytes.fromhex(page)) for page in disk.pages)
        return pages[: manifests.chunks_of(disk.size_bytes) * len(NONE)]

    def read_page(self, name: bytes) -> bytes:
        """A page (1,024 chunk names, 32 KiB) by its name, from any pack with a whole copy. RepositoryDamaged."""
        if name == NONE:
            return bytes(PAGE_BYTES)
        return self._first_sound(name, packs.PAGE, lambda place: self._page(name, place))

    def read_chunk(self, name: bytes, into: memoryview) -> None:
        """Fills `into`, which is as long as the chunk. RepositoryDamaged: then its content has no meaning."""
        self._first_sound(name, packs.CHUNK, lambda place: self._chunk(name, place, into))

    def _first_sound(self, name: bytes, kind: int, read: "Callable[[Place], Read]") -> Read:
        """From the first place where it is what was stored: a writer of the repository may add false copies. If no place has
        it, the index may be old: a collection moves what is needed, and deletes the pack a day later. The index is refreshed
        once for each unreadable pack."""
        for is_fresh in (False, True):
            failure = RepositoryDamaged(f"{'page' if kind else 'chunk'} {name.hex()[:16]} is in no pack of the repository")
            unsound = set[str]()
            try:
                for place in self.places(name):
                    if place.entry.kind == kind:
                        try:
                            return read(place)
                        except RepositoryDamaged as error:
                            failure = failure if unsound else error
                            unsound.add(place.pack)
            except RepositoryDamaged as error:  # from the footer of a pack
                failure, unsound = error, {error.detail}
            if is_fresh or (unsound and unsound <= self._unsound):
                break
            self.refresh()
            self._unsound |= unsound
        raise failure

    # ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def session(self) -> "Session":
        """A writing session, with the newest index of the packs."""
        self.refresh()
        condemned_packs(self.folder)
        return Session(self)

    def keep(self, point_id: UUID, *, kept: bool) -> None:
        """Sets whether the point is protected from removal. Idempotent."""
        name = f"{manifests.FOLDER}/{point_id}{KEPT_SUFFIX}"
        if kept:
            put(self.folder, name, [b""])
        else:
            self.folder.delete(name)
            self.folder.sync_folder(manifests.FOLDER)

    def remove(self, point_id: UUID) -> None:
        """Removes the point; its bytes stay until they are collected. BackupConflict for a protected one."""
        if point_id in self.kept_ids():
            raise BackupConflict(f"restore point {point_id} is protected", hint="take the protection off it first")
        self.folder.delete(manifests.file_name(point_id))
        self.folder.sync_folder(manifests.FOLDER)


def _names(folder: Folder, suffix: str) -> Iterator[str]:
    for entry in folder.entries(manifests.FOLDER):
        name = entry.name.removesuffix(suffix)
        if entry.name.endswith(suffix) and is_id(name):
            yield name


def is_id(name: str) -> bool:
    """Whether it is a restore point's id: files beside them may have any name."""
    try:
        return str(UUID(name)) == name
    except ValueError:
        return False


def condemned_packs(folder: Folder) -> frozenset[str]:
    """The packs in any list of condemned ones (`garbage.py`). RepositoryDamaged."""
    return frozenset(name for listed in condemned_lists(folder) for name in listed.packs)


@dataclass(frozen=True, slots=True)
class Condemned:
    """A list of packs that nothing needed at that time, in seconds since 1970 by the repository's own clock."""

    name: str
    at: float
    packs: tuple[str, ...]


def condemned_lists(folder: Folder) -> list[Condemned]:
    """Each is a file with one pack name per line; its name is the BLAKE3 of its bytes. RepositoryDamaged."""
    found = []
    for entry in folder.entries(CONDEMNED_FOLDER):
        name = f"{CONDEMNED_FOLDER}/{entry.name}"
        if entry.size_bytes > CONDEMNED_BYTES_MAX:
            raise RepositoryDamaged(f"the list {name} has {entry.size_bytes} bytes", hint=_LISTED_AGAIN)
        try:
            content = folder.read(name, 0, entry.size_bytes)
        except RepositoryDamaged:
            if entry.name in {one.name for one in folder.entries(CONDEMNED_FOLDER)}:
                raise
            continue  # another collection has finished with this list
        if blake3(content).hexdigest() != entry.name:
            raise RepositoryDamaged(f"the list {name} has changed", hint=_LISTED_AGAIN)
        found.append(Condemned(name, entry.modified_at, tuple(content.decode("latin-1").split())))
    return found


class Session:
    """The session of one run that writes. `add` may be called from any thread; its data is durable once `commit` returns.

    Chunks that the repository has are not written again. If a pack that the session relies on is condemned meanwhile, the
    commit is refused. A pack that is condemned later stays until a collection has read the manifest, which exists by then
    (`garbage.py`).
    """

    def __init__(self, repository: Repository) -> None:
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
        condemned = condemned_packs(folder)
        missing = self._used - {entry.name for entry in folder.entries(packs.FOLDER)}
        if missing or self._used & condemned:
            raise BackupConflict(
                "the repository's garbage was collected while the run went on, and took what the run relied on",
                hint="start the run again: it writes what is missing",
            )
        put(folder, manifests.file_name(manifest.shown.id), [manifests.written(manifest, self._keys, sign)])
