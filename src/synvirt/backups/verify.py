"""Whether what is in a repository is what was written. Nothing is changed; what is wrong is told in words.

verify_repository   every pack against its name, every manifest against its hash, and that no point lacks a chunk: none of it
                    needs the key, but with it each manifest is opened too
verify_point        every chunk of one restore point read, unpacked and held to its name, as a restore does
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

from synvirt.backups import manifest as manifests
from synvirt.backups import packs
from synvirt.backups.keys import CHUNK_BYTES, NAME_BYTES
from synvirt.backups.manifest import NONE, DiskMap
from synvirt.backups.repository import Repository, condemned_lists, header_of
from synvirt.copying import default_threads
from synvirt.disks.looking import first_found
from synvirt.errors import BackupNotFound, Cancelled, RepositoryDamaged
from synvirt.model import Bytes, Model

Stop = Callable[[], bool]
# Bytes in all, and those that were read.
OnProgress = Callable[[int, int], None]


class Report(Model):
    """What was looked at, and what is wrong. `wrongs`: each in a sentence, none for a repository that is whole.
    `damaged_points`: those of which not every byte can be restored."""

    packs: int = 0
    points: int = 0
    bytes_read: Bytes = 0
    wrongs: tuple[str, ...] = ()
    damaged_points: tuple[UUID, ...] = ()


def verify_repository(
    repository: Repository, stop: Stop = lambda: False, on_progress: OnProgress = lambda total, done: None
) -> Report:
    """Reads all of the repository once. `on_progress` is called from several threads. Cancelled, once `stop()`."""
    repository.refresh()
    wrongs = [*_header_and_lists(repository), *repository.unreadable.values()]
    sizes = repository.pack_sizes()
    broken = _broken_packs(repository, sizes, stop, on_progress)
    wrongs += broken.values()
    bad_names = {name for pack in broken for name in _changed_frames(repository, pack, sizes[pack])}
    damaged = []
    ids = repository.point_ids()
    for point_id in ids:
        if stop():
            raise Cancelled
        wrong = _wrong_of_point(repository, point_id, bad_names)
        if wrong is not None:
            wrongs.append(wrong)
            damaged.append(point_id)
    return Report(
        packs=len(sizes),
        points=len(ids),
        bytes_read=sum(sizes.values()),
        wrongs=tuple(wrongs),
        damaged_points=tuple(damaged),
    )


def _header_and_lists(repository: Repository) -> Iterator[str]:
    for check in (header_of, condemned_lists):
        try:
            check(repository.folder)
        except RepositoryDamaged as error:
            yield error.detail


def _broken_packs(repository: Repository, sizes: dict[str, int], stop: Stop, on_progress: OnProgress) -> dict[str, str]:
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

    with ThreadPoolExecutor(default_threads(), thread_name_prefix="verify") as pool:
        try:
            return dict(found for found in pool.map(look, sorted(sizes)) if found is not None)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _changed_frames(repository: Repository, pack: str, size_bytes: int) -> Iterator[bytes]:
    """The names whose frames in this pack are not what was stored, where it is there that they are read."""
    for entry in packs.read_footer(repository.folder, pack, size_bytes):
        place = repository.place(entry.name)
        if place is None or place.pack != pack:
            continue
        try:
            packs.read_frame(repository.folder, pack, entry)
        except RepositoryDamaged:
            yield entry.name


def _wrong_of_point(repository: Repository, point_id: UUID, bad_names: set[bytes]) -> str | None:
    missing = changed = 0
    try:
        for disk in repository.manifest(point_id).shown.disks:
            changed += sum(bytes.fromhex(page) in bad_names for page in disk.pages)
            for name in chunk_names(repository, disk):
                missing += repository.place(name) is None
                changed += name in bad_names
    except (RepositoryDamaged, BackupNotFound) as error:
        return error.detail
    if missing:
        return f"restore point {point_id} lacks {missing} chunk(s), which are in no pack of the repository"
    return f"restore point {point_id} needs {changed} chunk(s) that have changed" if changed else None


def chunk_names(repository: Repository, disk: DiskMap) -> Iterator[bytes]:
    """Of the chunks that are not zeros. RepositoryDamaged, where a page of them is."""
    names = repository.chunk_names(disk)
    for at in range(0, len(names), NAME_BYTES):
        if (name := names[at : at + NAME_BYTES]) != NONE:
            yield name


def verify_point(
    repository: Repository,
    point_id: UUID,
    *,
    stop: Stop = lambda: False,
    on_progress: Callable[[int], None] = lambda count: None,
) -> str | None:
    """What is wrong first, or None: then all of the point was read, and is what was backed up. `on_progress`: bytes read."""
    repository.refresh()
    done = [0] * len(repository.manifest(point_id).shown.disks)
    for number, disk in enumerate(repository.manifest(point_id).shown.disks):
        names = repository.chunk_names(disk)
        lengths = {NONE: 0}
        for at in range(manifests.chunks_of(disk.size_bytes)):
            name = names[at * NAME_BYTES : (at + 1) * NAME_BYTES]
            lengths.setdefault(name, min(CHUNK_BYTES, disk.size_bytes - at * CHUNK_BYTES))
        del lengths[NONE]

        def look(piece: tuple[bytes, int], *_: memoryview, number: int = number) -> str | None:
            try:
                done[number] += len(repository.read_chunk(*piece))
            except RepositoryDamaged as error:
                return error.detail
            return None

        found = first_found(
            iter(lengths.items()), look, threads=default_threads(), stop=stop, on_progress=lambda: on_progress(sum(done))
        )
        if found is not None:
            return found
    return None
