"""Checks that a repository has what was written. Nothing is changed; damage is reported in words.

look_at_packs       every pack against its name: this reads all of the repository
judged              every manifest against its hash, and whether a point lacks a chunk
verify_repository   both of them; neither needs the key, but with it each manifest is opened too
verify_point        every chunk of one restore point, read, unpacked and compared with its name, as in a restore

Long reads report how far they are, and can go on from there: what was checked is not read again.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Self, TypeVar
from uuid import UUID

from synvirt.copying import default_threads
from synvirt.disks.checking.looking import first_found
from synvirt.errors import BackupNotFound, Cancelled, RepositoryDamaged
from synvirt.model.values import Bytes, Model
from synvirt.repository import condemned, packs
from synvirt.repository.keys import CHUNK_BYTES, NAME_BYTES
from synvirt.repository.manifest import NONE, PAGE_BYTES, DiskMap, names_in
from synvirt.repository.repository import Repository, header_of
from synvirt.sizes import counted

A = TypeVar("A")
B = TypeVar("B")
Stop = Callable[[], bool]
# Total bytes, and bytes read.
OnProgress = Callable[[int, int], None]


# The most items per kind of damage in a report, and in one message of a worker. A name or a sentence takes at most 1.6 KiB.
LISTED_MAX = 200


class Report(Model):
    """What was checked, and what is wrong. `wrongs`: one sentence each, none for a sound repository. `damaged_points`: those
    that cannot be restored completely; `damaged_packs`: those that are not what was written. `more_…`: how many more of each
    there are than a list of 200 has."""

    packs: int = 0
    points: int = 0
    bytes_read: Bytes = 0
    wrongs: tuple[str, ...] = ()
    damaged_points: tuple[UUID, ...] = ()
    damaged_packs: tuple[str, ...] = ()
    more_wrongs: int = 0
    more_damaged_points: int = 0
    more_damaged_packs: int = 0

    def parts(self) -> Iterator["Report"]:
        """The report in parts whose lists have LISTED_MAX each; `after` joins them."""
        longest = max(len(getattr(self, name)) for name in _LISTS)
        for at in range(0, max(longest, 1), LISTED_MAX):
            yield self._cut(at)

    def after(self, before: "Report") -> "Report":
        """This part of a report, joined to the parts before it."""
        return self.model_copy(update={name: (*getattr(before, name), *getattr(self, name)) for name in _LISTS})

    def listed(self) -> "Report":
        """The report for people and for storage: the first LISTED_MAX of each list, and how many more there are."""
        more = {f"more_{name}": max(len(getattr(self, name)) - LISTED_MAX, 0) for name in _LISTS}
        return self._cut(0).model_copy(update=more)

    def _cut(self, at: int) -> "Report":
        return self.model_copy(update={name: getattr(self, name)[at : at + LISTED_MAX] for name in _LISTS})


_LISTS = ("wrongs", "damaged_points", "damaged_packs")


@dataclass(frozen=True, slots=True)
class Looked:
    """How far a verification is: `bytes_read`. `broken`: by the name of each broken pack, what is wrong in it, in the order in
    which it was found. One verification has one such dictionary, which grows: there may be thousands."""

    bytes_read: int = 0
    broken: dict[str, str] = field(default_factory=dict)

    def parts(self, before: Self, sent: int) -> Iterator[Self]:
        """What is new since `before`, of whose broken packs `sent` were sent, in parts of LISTED_MAX packs each. Only the last
        part has the new position: a reader without all parts goes on where `before` was."""
        new = [*islice(self.broken.items(), sent, None)]
        for at in range(0, max(len(new), 1), LISTED_MAX):
            is_last = at + LISTED_MAX >= len(new)
            yield replace(self if is_last else before, broken=dict(new[at : at + LISTED_MAX]))

    def after(self, before: Self) -> Self:
        """This part, joined to what was known before. It is added to the dictionary of `before` itself."""
        before.broken.update(self.broken)
        return replace(self, broken=before.broken)


@dataclass(frozen=True, slots=True)
class PacksLooked(Looked):
    """A position in a repository's packs, the oldest first: up to `pack`, written at `written_at` (seconds since 1970, by the
    clock of the host that stores it); `packs`: how many that are."""

    written_at: float = 0.0
    pack: str = ""
    packs: int = 0


@dataclass(frozen=True, slots=True)
class PointLooked(Looked):
    """A position in a restore point: its first `chunks`. `wrong`: the first fault in words, or None. `disks`: the numbers
    of the disks that are damaged; none, where the manifest is."""

    chunks: int = 0
    wrong: str | None = None
    disks: tuple[int, ...] = ()


def verify_repository(repository: Repository, *, threads: int | None = None) -> Report:
    """Reads all of the repository once."""
    return judged(repository, look_at_packs(repository, threads=threads))


def judged(
    repository: Repository,
    looked: PacksLooked,
    stop: Stop = lambda: False,
    on_pages: Callable[[int], None] = lambda bytes_read: None,
) -> Report:
    """The result for the repository and each of its points, once all packs were checked. `on_pages` is called while their pages
    are read. Cancelled, once `stop()`."""
    # An unreadable pack may be gone by now, deleted by a collection. Points that need it then lack its chunks.
    repository.refresh()
    wrongs = [*_header_and_lists(repository), *repository.unreadable.values()]
    sizes = repository.pack_sizes()
    broken = {pack: why for pack, why in looked.broken.items() if pack in sizes}
    wrongs += broken.values()
    bad_names = {name for pack in broken for name in _changed_frames(repository, pack)}
    # Even an attacker's pack matches its name. So of a frame in several packs at least one copy must open.
    bad_names |= {name for name in repository.index.doubles() if not repository.is_sound(name)}
    damaged: list[UUID] = []
    pages: dict[str, int] = {}
    ids = repository.point_ids()
    for point_id in ids:
        if stop():
            raise Cancelled
        wrong = _wrong_of_point(repository, point_id, bad_names, pages)
        on_pages(len(pages) * PAGE_BYTES)
        if wrong is not None:
            wrongs.append(wrong)
            damaged.append(point_id)
    return Report(
        packs=looked.packs,
        points=len(ids),
        bytes_read=looked.bytes_read,
        wrongs=tuple(wrongs),
        damaged_points=tuple(damaged),
        damaged_packs=tuple(sorted(broken)),
    )


def _header_and_lists(repository: Repository) -> Iterator[str]:
    for check in (header_of, condemned.lists_of):
        try:
            check(repository.folder)
        except RepositoryDamaged as error:
            yield error.detail


def look_at_packs(
    repository: Repository,
    stop: Stop = lambda: False,
    on_progress: OnProgress = lambda total, done: None,
    *,
    threads: int | None = None,
    since: PacksLooked | None = None,
    on_looked: Callable[[PacksLooked], None] = lambda looked: None,
) -> PacksLooked:
    """Checks all packs that were written after `since`, with new ones that a resumed check finds. `on_looked` is called after
    each, `on_progress` from several threads. Cancelled, once `stop()`."""
    repository.refresh()
    sizes, looked = repository.pack_sizes(), since or PacksLooked()
    broken = looked.broken
    there = ((entry.modified_at, entry.name) for entry in repository.folder.entries(packs.FOLDER) if entry.name in sizes)
    left = sorted(one for one in there if since is None or one > (since.written_at, since.pack))
    done, lock = looked.bytes_read, threading.Lock()
    total = done + sum(sizes[name] for _, name in left)

    def counted(count: int) -> None:
        nonlocal done
        if stop():
            raise Cancelled
        with lock:
            done += count
            so_far = done
        on_progress(total, so_far)

    def look(one: tuple[float, str]) -> str | None:
        try:
            packs.check_whole(repository.folder, one[1], sizes[one[1]], on_read=counted)
        except RepositoryDamaged as error:
            return error.detail
        return None

    with _mapping(threads or default_threads()) as in_threads:
        for (written_at, name), why in zip(left, in_threads(look, left), strict=True):
            if why is not None:
                broken[name] = why
            looked = PacksLooked(
                written_at=written_at,
                pack=name,
                packs=looked.packs + 1,
                bytes_read=looked.bytes_read + sizes[name],
                broken=broken,
            )
            on_looked(looked)
    return looked


@contextmanager
def _mapping(threads: int) -> Iterator[Callable[[Callable[[A], B], Sequence[A]], Iterator[B]]]:
    """`map`, by so many threads. One is the caller's own."""
    if threads == 1:
        yield map
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            yield pool.map
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _changed_frames(repository: Repository, pack: str) -> Iterator[bytes]:
    """The names of changed frames in this pack, where reads use this copy."""
    for entry in repository.index.entries(pack):
        place = repository.place(entry.name)
        if place is None or place.pack != pack:
            continue
        try:
            packs.read_frame(repository.folder, pack, entry)
        except RepositoryDamaged:
            yield entry.name


def _wrong_of_point(repository: Repository, point_id: UUID, bad_names: set[bytes], known: dict[str, int]) -> str | None:
    """`known`: for each checked page, the number of its faulty chunks. None too, if the point was removed meanwhile."""
    try:
        pages = {page for disk in repository.manifest(point_id).shown.disks for page in disk.pages}
        for page in pages - known.keys():
            known[page] = _wrongs_in_page(repository, bytes.fromhex(page), bad_names)
    except BackupNotFound:
        return None
    except RepositoryDamaged as error:
        return error.detail
    wrong = sum(known[page] for page in pages)
    return f"restore point {point_id} lacks {counted(wrong, 'chunk')}: missing, or changed" if wrong else None


def _wrongs_in_page(repository: Repository, name: bytes, bad_names: set[bytes]) -> int:
    page = repository.read_page(name)
    changed = sum(chunk in bad_names for chunk in names_in(page)) if bad_names else 0
    return changed + len(repository.index.lacking(page))


class _Looking:
    """How far threads are with a point's chunks: a chunk counts once all before it are done. Only one thread at a time calls
    `say`."""

    def __init__(self, since: PointLooked, say: Callable[[PointLooked], None]) -> None:
        self.now, self._say = since, say
        # Lengths of chunks that were checked before an earlier one, by their numbers.
        self._ahead: dict[int, int] = {}
        self._lock = threading.Lock()

    def looked_at(self, number: int, length: int) -> None:
        with self._lock:
            self._ahead[number] = length
            chunks, bytes_read = self.now.chunks, self.now.bytes_read
            while (more := self._ahead.pop(chunks, None)) is not None:
                chunks, bytes_read = chunks + 1, bytes_read + more
            if chunks != self.now.chunks:
                self.now = replace(self.now, chunks=chunks, bytes_read=bytes_read)
                self._say(self.now)

    def is_wrong(self, why: str, pack: str | None, disks: Iterable[int]) -> None:
        with self._lock:
            damaged = tuple(sorted({*self.now.disks, *disks}))
            self.now = replace(self.now, wrong=self.now.wrong or why, disks=damaged)
            if pack is not None:
                self.now.broken.setdefault(pack, why)


def verify_point(
    repository: Repository,
    point_id: UUID,
    *,
    sha256: str | None = None,
    stop: Stop = lambda: False,
    since: PointLooked | None = None,
    on_looked: Callable[[PointLooked], None] = lambda looked: None,
) -> PointLooked:
    """Reads all of the point after `since`, whatever is found. `wrong` is None, where the point is what was backed up.
    `sha256`: of its manifest, as for `Repository.unread`. `on_looked` is called during the check, one call at a time.
    Cancelled, once `stop()`; BackupNotFound, RepositoryDamaged, where no manifest of it opens."""
    repository.refresh()
    looking = _Looking(since or PointLooked(), on_looked)

    def read(name: bytes, how: Callable[[], object], disks: Iterable[int]) -> bool:
        try:
            how()
        except RepositoryDamaged as error:
            place = repository.place(name)
            looking.is_wrong(error.detail, None if place is None else place.pack, disks)
            return False
        return True

    def look(piece: tuple[int, tuple[int, bytes, int]], into: memoryview, _: memoryview) -> None:
        number, (disk, name, length) = piece
        read(name, partial(repository.read_chunk, name, into[:length]), [disk])
        looking.looked_at(number, length)

    disks = dict(enumerate(repository.manifest(point_id, sha256).shown.disks))
    of_page: dict[str, set[int]] = defaultdict(set)
    for number, disk in disks.items():
        for page in disk.pages:
            of_page[page].add(number)
    for page, numbers in of_page.items():
        name = bytes.fromhex(page)
        if not read(name, partial(repository.read_page, name), numbers):
            # Which chunks they have is not known. Those of the other disks are numbered anew.
            looking.now = replace(looking.now, chunks=0, bytes_read=0)
            for number in numbers:
                disks.pop(number, None)
    chunks = islice(enumerate(_chunks(repository, disks)), looking.now.chunks, None)
    first_found(chunks, look, threads=default_threads(), stop=stop)
    return looking.now


def _chunks(repository: Repository, disks: dict[int, DiskMap]) -> Iterator[tuple[int, bytes, int]]:
    """The disk's number, name and length of the disks' chunks, in order: for each disk, each chunk that is not zeros once."""
    import numpy as np

    for number, disk in disks.items():
        names = repository.chunk_names(disk)
        first = np.sort(np.unique(np.frombuffer(names, f"S{NAME_BYTES}"), return_index=True)[1])
        for at in first.tolist():
            if (name := names[at * NAME_BYTES : (at + 1) * NAME_BYTES]) != NONE:
                yield number, name, min(CHUNK_BYTES, disk.size_bytes - at * CHUNK_BYTES)
