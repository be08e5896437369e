"""Whether what is in a repository is what was written. Nothing is changed; what is wrong is told in words.

verify_store    every pack against its name, every manifest against its hash, and that no point lacks a chunk: none of it needs
                the key, but with it each manifest is opened too
verify_point    every chunk of one restore point read, unpacked and held to its name, as a restore does
"""

from collections.abc import Callable, Iterator
from uuid import UUID

from synvirt.backups import manifest as manifests
from synvirt.backups import packs
from synvirt.backups.keys import CHUNK_BYTES, NAME_BYTES
from synvirt.backups.manifest import NONE, DiskMap
from synvirt.backups.repository import Repository, condemned_lists, header_of
from synvirt.copying import default_threads
from synvirt.disks.looking import first_found
from synvirt.errors import RepositoryDamaged, SynvirtError

Stop = Callable[[], bool]


def verify_store(repository: Repository, *, stop: Stop = lambda: False) -> list[str]:
    """What is wrong, each in a sentence; an empty list for a repository that is whole. Cancelled, once `stop()`."""
    return list(_wrongs(repository, stop))


def _wrongs(repository: Repository, stop: Stop) -> Iterator[str]:
    folder = repository.folder
    repository.refresh()
    for check in (lambda: header_of(folder), lambda: condemned_lists(folder)):
        try:
            check()
        except RepositoryDamaged as error:
            yield error.detail
    yield from repository.unreadable.values()
    for name, size_bytes in sorted(repository.pack_sizes().items()):
        if stop():
            return
        try:
            packs.check_whole(folder, name, size_bytes)
        except SynvirtError as error:
            yield error.detail
    for point_id in repository.point_ids():
        try:
            repository.manifest(point_id)
            missing = _missing(repository, repository.shown(point_id).disks)
        except SynvirtError as error:
            yield error.detail
        else:
            if missing:
                yield f"restore point {point_id} lacks {missing} chunk(s), which are in no pack of the repository"


def _missing(repository: Repository, disks: tuple[DiskMap, ...]) -> int:
    """How many chunks of the disks are nowhere. RepositoryDamaged, where a page of them is."""
    return sum(repository.place(name) is None for disk in disks for name in chunk_names(repository, disk))


def chunk_names(repository: Repository, disk: DiskMap) -> Iterator[bytes]:
    """Of the chunks that are not zeros."""
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
