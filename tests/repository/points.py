"""Backing up and restoring in memory: what the tests of the store say in one line."""

from uuid import UUID, uuid4

import pytest

from synvirt.blocks import DiskReader, DiskWriter
from synvirt.copying import copy
from synvirt.model.values import now
from synvirt.repository.disk import ChunkWriter, PointReader
from synvirt.repository.folder import Folder
from synvirt.repository.keys import CHUNK_BYTES
from synvirt.repository.manifest import Manifest, Named, Sealed, Shown
from synvirt.repository.repository import Repository, create
from synvirt.repository.session import Session
from tests.fakes.disks import MemoryReader, MemoryWriter

KEY = bytes(range(32))
QUARTER = CHUNK_BYTES // 4


def opened(folder: Folder, *, new: bool = False) -> Repository:
    if new:
        create(folder, KEY)
    return Repository(folder, KEY)


def disk(blocks: str) -> MemoryReader:
    """A character is a quarter of a chunk."""
    return MemoryReader(blocks, block_bytes=QUARTER)


def back_up(repository: Repository, *disks: DiskReader, threads: int | None = None, session: Session | None = None) -> UUID:
    session = session or Session(repository)
    maps = []
    for reader in disks:
        writer = ChunkWriter(session, reader.size)
        if threads == 0:
            _copy_in_one(reader, writer)
        else:
            copy(reader, writer, fresh=False, threads=threads)
        maps.append(writer.finish())
    named = tuple(Named(target=f"disk{at}", path="/x", size_bytes=one.size_bytes) for at, one in enumerate(maps))
    shown = Shown(id=uuid4(), created_at=now(), disks=tuple(maps))
    sealed = Sealed(
        vm_id=str(uuid4()),
        vm_name="guest",
        consistency="offline",
        job_id=uuid4(),
        run_id=uuid4(),
        domain_xml="<domain/>",
        disks=named,
    )
    session.commit(Manifest(shown=shown, sealed=sealed))
    return shown.id


def _copy_in_one(reader: DiskReader, writer: DiskWriter) -> None:
    """For thousands of tiny disks, which copy() takes threads for."""
    content = bytearray(reader.size)
    reader.read_into(0, memoryview(content))
    writer.write(0, memoryview(content))


def restored(repository: Repository, point_id: UUID, *, threads: int | None = None) -> list[bytes]:
    found = []
    for one in repository.manifest(point_id).shown.disks:
        writer = MemoryWriter(one.size_bytes)
        if threads == 0:
            _copy_in_one(PointReader(repository, one), writer)
        else:
            copy(PointReader(repository, one), writer, threads=threads)
        found.append(bytes(writer.content))
    return found


def chunks_read(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The names of all chunks that repositories are asked for from now on, each time it happens."""
    read: list[bytes] = []
    read_chunk = Repository.read_chunk

    def counted(self: Repository, name: bytes, into: memoryview) -> None:
        read.append(name)
        read_chunk(self, name, into)

    monkeypatch.setattr(Repository, "read_chunk", counted)
    return read
