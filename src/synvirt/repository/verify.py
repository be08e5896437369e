"""Whether what is in a repository is what was written. Nothing is changed; what is wrong is reported in words.

verify_repository   every pack against its name, every manifest against its hash, and that no point lacks a chunk: none of it
                    needs the key, but with it each manifest is opened too
verify_point        every chunk of one restore point read, unpacked and held to its name, as a restore does
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from synvirt.copying import default_threads
from synvirt.disks.checking.looking import Tally, first_found
from synvirt.errors import BackupNotFound, Cancelled, RepositoryDamaged
from synvirt.model.values import Bytes, Model
from synvirt.repository import packs
from synvirt.repository.keys import CHUNK_BYTES, NAME_BYTES
from synvirt.repository.manifest import NONE, DiskMap, names_in
from synvirt.repository.repository import Repository, condemned_lists, header_of

Stop = Callable[[], bool]
# Bytes in all, and those that were read.
OnProgress = Callable[[int, int], None]


class Report(Model):
    """What was looked at, and what is wrong. `wrongs`: each in a sentence, none for a repository that is whole.
    `damaged_points`: those of which not every byte can be restored; `damaged_packs`: those that are not what was written."""

    packs: int = 0
    points: int = 0
    bytes_read: Bytes = 0
    wrongs: tuple[str, ...] = ()
    damaged_points: tuple[UUID, ...] = ()
    damaged_packs: tuple[str, ...] = ()


def verify_repository(
    repository: Repository,
    stop: Stop = lambda: False,
    on_progress: OnProgress = lambda total, done: None,
    *,
    threads: int | None = None,
) -> Report:
    """Reads all of the repository once. `on_progress` is called from several threads. Cancelled, once `stop()`."""
    repository.refresh()
    wrongs = [*_header_and_lists(repository), *repository.unreadable.values()]
    sizes = repository.pack_sizes()
    broken = _broken_packs(repository, sizes, stop, on_progress, threads or default_threads())
    wrongs += broken.values()
    bad_names = {name for pack in broken for name in _changed_frames(repository, pack)}
    # A pack is what its name says, also one of an attacker: of what lies in several, one at least must open.
    bad_names |= {name for name in repository.index.doubles() if not repository.is_sound(name)}
    damaged: list[UUID] = []
    pages: dict[str, int] = {}
    ids = repository.point_ids()
    for point_id in ids:
        if stop():
            raise Cancelled
        wrong = _wrong_of_point(repository, point_id, bad_names, pages)
        if wrong is not None:
            wrongs.append(wrong)
            damaged.append(point_id)
    return Report(
        packs=len(sizes),
        points=len(ids),
        bytes_read=sum(sizes.values()),
        wrongs=tuple(wrongs),
        damaged_points=tuple(damaged),
        damaged_packs=tuple(sorted(broken)),
    )


def _header_and_lists(repository: Repository) -> Iterator[str]:
    for check in (header_of, condemned_lists):
        try:
            check(repository.folder)
        except RepositoryDamaged as error:
            yield error.detail


def _broken_packs(
    repository: Repository, sizes: dict[str, int], stop: Stop, on_progress: OnProgress, threads: int
) -> dict[str, str]:
    """Why each pack that is not whole is not."""
    total, done, lock = sum(sizes.values()), 0, threading.Lock()

    def counted(count: int) -> None:
        nonlocal done
        if stop():
            raise Cancelled
        with lock:
            done += count
            so_far = done
        on_progress(total, so_far)

    def look(name: str) -> tuple[str, str] | None:
        try:
            packs.check_whole(repository.folder, name, sizes[name], on_read=counted)
        except RepositoryDamaged as error:
            return name, error.detail
        return None

    if threads == 1:
        return dict(found for found in map(look, sorted(sizes)) if found is not None)
    with ThreadPoolExecutor(threads, thread_name_prefix="verify") as pool:
        try:
            return dict(found for found in pool.map(look, sorted(sizes)) if found is not None)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _changed_frames(repository: Repository, pack: str) -> Iterator[bytes]:
    """The names whose frames in this pack are not what was stored, where it is there that they are read."""
    for entry in repository.index.entries(pack):
        place = repository.place(entry.name)
        if place is None or place.pack != pack:
            continue
        try:
            packs.read_frame(repository.folder, pack, entry)
        except RepositoryDamaged:
            yield entry.name


def _wrong_of_point(repository: Repository, point_id: UUID, bad_names: set[bytes], known: dict[str, int]) -> str | None:
    """`known`: of each page that was looked at, how many of its chunks are not as they should be."""
    try:
        pages = {page for disk in repository.manifest(point_id).shown.disks for page in disk.pages}
        for page in pages - known.keys():
            known[page] = _wrongs_in_page(repository, bytes.fromhex(page), bad_names)
    except (RepositoryDamaged, BackupNotFound) as error:
        return error.detail
    wrong = sum(known[page] for page in pages)
    return f"restore point {point_id} needs {wrong} chunk(s) that are missing or have changed" if wrong else None


def _wrongs_in_page(repository: Repository, name: bytes, bad_names: set[bytes]) -> int:
    page = repository.read_page(name)
    changed = sum(chunk in bad_names for chunk in names_in(page)) if bad_names else 0
    return changed + len(repository.index.lacking(page))


def verify_point(
    repository: Repository,
    point_id: UUID,
    *,
    stop: Stop = lambda: False,
    on_progress: Callable[[int], None] = lambda count: None,
    damaged: set[str] | None = None,
) -> str | None:
    """What is wrong first, or None: then all of the point was read, and is what was backed up. `on_progress`: bytes read.
    `damaged`: takes the packs in which something is wrong; with it all is read, whatever is found."""
    repository.refresh()
    done = Tally()
    wrongs: list[str] = []

    def wrong(name: bytes, error: RepositoryDamaged) -> str | None:
        place = repository.place(name)
        if damaged is None:
            return error.detail
        if place is not None:
            damaged.add(place.pack)
        wrongs.append(error.detail)
        return None

    def look(chunk: tuple[bytes, int], into: memoryview, _: memoryview) -> str | None:
        name, length = chunk
        try:
            repository.read_chunk(name, into[:length])
        except RepositoryDamaged as error:
            return wrong(name, error)
        done.add(length)
        return None

    disks = repository.manifest(point_id).shown.disks
    for page in {page for disk in disks for page in disk.pages}:
        try:
            repository.read_page(bytes.fromhex(page))
        except RepositoryDamaged as error:
            found = wrong(bytes.fromhex(page), error)
            if found is not None:
                return found
    if wrongs:
        return wrongs[0]
    found = first_found(
        _chunks(repository, disks), look, threads=default_threads(), stop=stop, on_progress=lambda: on_progress(done.total)
    )
    return found or next(iter(wrongs), None)


def _chunks(repository: Repository, disks: tuple[DiskMap, ...]) -> Iterator[tuple[bytes, int]]:
    """Name and length of the disks' chunks, in order: of each disk, each that is not zeros once."""
    import numpy as np

    for disk in disks:
        names = repository.chunk_names(disk)
        first = np.sort(np.unique(np.frombuffer(names, f"S{NAME_BYTES}"), return_index=True)[1])
        for at in first.tolist():
            if (name := names[at * NAME_BYTES : (at + 1) * NAME_BYTES]) != NONE:
                yield name, min(CHUNK_BYTES, disk.size_bytes - at * CHUNK_BYTES)
