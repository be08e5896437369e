"""The cages of backups' orders: the repository, the host's cache of it, and what the order itself names; nothing else.

Such a worker is another user than the service, but makes and opens files as the service's user: the service, other hosts by
NFS, and QEMU open these files again, so they must belong to the right user.
"""

import os
import posixpath
from collections.abc import Iterable
from dataclasses import replace

from synvirt.backups.orders import (
    CollectOrder,
    MeasureOrder,
    ServeOrder,
    TakeOrder,
    VerifyPointOrder,
    VerifyRepositoryOrder,
    ZfsChangesSpec,
)
from synvirt.cage import Cage, Network
from synvirt.disks.specs import BlankSpec, FileWriterSpec, Qcow2WriterSpec
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.repository.specs import FolderSpec, PointSpec, RepositorySpec

# It is never read: it stands for a reader that has a cage of its own.
_NOTHING = BlankSpec(size_bytes=512)


def cage_of_take(order: TakeOrder) -> Cage:
    """`zfs send`, which lists changes, already runs: its stream is open."""
    readers = [spec for disk in order.disks for spec in (disk.reader, disk.changes) if spec is not None]
    assumed = FileWriterSpec(path=os.devnull, size_bytes=0)
    disks = [
        DiskOrder(key=str(number), reader=spec, writer=assumed)
        for number, spec in enumerate(readers)
        if not isinstance(spec, ZfsChangesSpec)
    ]
    own = cage_of(CopyOrder(disks=tuple(disks)))
    journal = () if order.journal is None else (posixpath.dirname(order.journal),)
    return _with(replace(own, writes=(*own.writes, *journal)), [order.repository], writes_points=True)


def cage_of_look(order: VerifyPointOrder | VerifyRepositoryOrder) -> Cage:
    return _with(Cage(), [order.repository])


def cage_of_measuring(order: MeasureOrder) -> Cage:
    return _with(Cage(), [spec.repository for spec in order.disks])


def cage_of_collecting(order: CollectOrder) -> Cage:
    return _with(Cage(), [order.repository], writes_points=not order.dry_run)


def cage_of_serving(order: ServeOrder) -> Cage:
    """Includes the folder of its sockets, for QEMU to connect to."""
    folders = dict.fromkeys(posixpath.dirname(path) for path in order.sockets.values())
    return _with(Cage(writes=tuple(folders), network=Network.LOCAL), [order.repository])


def cage_of_restore(order: CopyOrder) -> Cage:
    """For an order whose readers are disks of points, some or all."""
    disks, made = [], list[str]()
    programs = any(isinstance(disk.writer, Qcow2WriterSpec) for disk in order.disks)
    for disk in order.disks:
        writer = disk.writer
        if isinstance(writer, Qcow2WriterSpec):
            made.append(posixpath.dirname(writer.path))  # a new file's name is written there
            writer = FileWriterSpec(path=writer.path, size_bytes=0)
        reader = _NOTHING if isinstance(disk.reader, PointSpec) else disk.reader
        disks.append(replace(disk, reader=reader, writer=writer))
    own = cage_of(replace(order, disks=tuple(disks)))
    if programs:  # qemu-img writes qcow2, and reads the disk from a socket
        own = replace(own, programs=True, network=own.network | Network.LOCAL, writes=(*own.writes, *made), temporary=True)
    return _with(own, [disk.reader.repository for disk in order.disks if isinstance(disk.reader, PointSpec)])


def _with(own: Cage, repositories: Iterable[RepositorySpec], *, writes_points: bool = False) -> Cage:
    reads, writes, network, temporary = list(own.reads), list(own.writes), own.network, own.temporary
    for repository in dict.fromkeys(repositories):
        if isinstance(repository.place, FolderSpec):
            (writes if writes_points else reads).append(repository.place.path)
        else:
            network |= Network.ELSEWHERE
        if repository.cache is None:
            temporary = True  # SQLite makes unnamed files there
        else:
            writes.append(posixpath.dirname(repository.cache))  # and others next to its own
    return replace(
        own,
        reads=tuple(reads),
        writes=tuple(dict.fromkeys(writes)),
        network=network,
        temporary=temporary,
        files_as_service=True,
    )
