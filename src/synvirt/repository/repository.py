"""A repository: packs and manifests in a folder, found by their content. docs/backup-format.md is the whole format.

A restore point exists from the moment its manifest has its name: its packs are durable by then. Nothing is ever changed in
place. In memory there is an index (index.py) of the packs' footers; a file of this host has copies of them.

    manifest(id) ─▶ chunk_names(disk) ─▶ read_chunk(name)           disk.py makes a DiskReader of it; session.py writes
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID, uuid4

from blake3 import blake3

from synvirt.errors import BackupConflict, BackupNotFound, RepositoryDamaged, RepositoryKeyWrong, SynvirtError
from synvirt.repository import condemned, key_change, packs
from synvirt.repository import manifest as manifests
from synvirt.repository.folder import UNFINISHED, Folder, put
from synvirt.repository.keys import CHUNK_BYTES, KeyRing, Keys
from synvirt.repository.manifest import NONE, PAGE_BYTES, PAGE_CHUNKS, DiskMap, Manifest, Shown, Unread
from synvirt.sizes import KIB

if TYPE_CHECKING:  # it loads numpy, which a service without a repository does not need
    from synvirt.repository.index import Place

Read = TypeVar("Read")

FORMAT = 1
HEADER = "repository"
# It has some 300.
HEADER_BYTES_MAX = 64 * KIB
KEPT_SUFFIX = ".kept"
FOLDERS = (packs.FOLDER, manifests.FOLDER, condemned.FOLDER, key_change.FOLDER, UNFINISHED)


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


def check_key(folder: Folder, keys: Sequence[bytes]) -> None:
    """RepositoryKeyWrong, where none of these keys opens what lies there. RepositoryUnreachable, RepositoryDamaged."""
    check = header_of(folder)["key_check"]
    for key in keys[:-1]:
        with contextlib.suppress(RepositoryKeyWrong):
            key_change.masters(folder, check, key)
            return
    key_change.masters(folder, check, keys[-1])


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
                self._condemned = condemned.packs_of(self.folder)
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
                yield UUID(one.point_id), found if isinstance(found, SynvirtError) else (one, found)
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

    # ── keeping ──────────────────────────────────────────────────────────────────────────────────────────────────────

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
