"""A restore in place onto a real zfs volume: what it held comes back where the restore fails, and nothing of ours stays."""

from collections.abc import Iterator
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

import pytest

from synvirt.backups.restores import in_place, present
from synvirt.backups.restores.domain import Place
from synvirt.blocks import Extent
from synvirt.destinations.zfs_links import Links
from synvirt.disks import open_writer
from synvirt.errors import DiskReadFailed, DiskWriteFailed
from synvirt.jobs.copying_disks import Openers, copy_disks
from synvirt.jobs.ledger import Ledger
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.model.job import Progress
from synvirt.repository.specs import FolderSpec, PointSpec, RepositorySpec
from synvirt.store import Store
from tests.guest.zvols import POOL, small_pool, zfs

MIB = 1 << 20
SIZE = 4 * MIB
NOW, THEN = Random(1).randbytes(SIZE), Random(2).randbytes(3 * MIB)


class Disk:
    """As the point has it: smaller than the volume by now. `breaks`: it cannot be read to its end."""

    size, max_readers = len(THEN), 1

    def __init__(self, *, breaks: bool) -> None:
        self._breaks = breaks

    def extents(self) -> Iterator[Extent]:
        yield Extent(0, MIB)
        yield Extent(MIB, MIB, zero=True)
        yield Extent(2 * MIB, MIB)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if self._breaks and offset >= 2 * MIB:
            raise DiskReadFailed("broken")
        buffer[:] = THEN[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("breaks", [True, False])
def test_a_volume_is_restored_or_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    volume = f"{POOL}/restored-{uuid4().hex[:8]}"
    zfs("create", "-s", "-V", str(SIZE), "-o", "volblocksize=65536", "-o", "volmode=dev", volume)
    device = Path(Links().device(volume))
    device.write_bytes(NOW)
    monkeypatch.setattr(present, "runs", lambda domain: False)  # there is no libvirt here
    store = Store(f"sqlite:///{tmp_path / 'test.db'}")
    undo = in_place.undo(cast("Any", SimpleNamespace(domain=lambda *_: None)), {}) | {"checkpoints": lambda run_id, name: None}
    ledger = Ledger(store.ledgers, "run", host="local", undo=undo)
    run = SimpleNamespace(id=uuid4(), progress=Progress())
    wire: Any = SimpleNamespace(say=lambda message: None, stop=lambda: False)

    def copied(order: DiskOrder, stop: object) -> None:
        openers = Openers(reader=lambda spec, pace=None: Disk(breaks=breaks), writer=open_writer)
        copy_disks(CopyOrder(disks=(order,)), wire, openers)

    under_way: Any = SimpleNamespace(run=run, stop=lambda: False)
    working = SimpleNamespace(data_bytes=lambda specs, stop: (2 * MIB,))
    copying: Any = SimpleNamespace(under_way=under_way, copy=copied, working=working)
    repository = RepositorySpec(place=FolderSpec(path="/x"), key="")
    spec = PointSpec(repository=repository, point_id="", number=0)
    domain = SimpleNamespace(UUIDString=lambda: str(uuid4()))
    restored = in_place._Restored(cast("Any", None), ledger, copying, lambda: domain, resumed=False)
    place = Place(str(device), "block")
    if breaks:
        with pytest.raises(DiskReadFailed):
            restored.disks({"vda": (place, Disk.size, spec)})
        assert zfs("list", "-Ho", "name", "-t", "snapshot", "-r", volume).split() == [f"{volume}@synvirt-restore-{run.id}"]
        assert ledger.sweep(run.id)
        assert [device.read_bytes() == NOW] == [True]
    else:
        restored.disks({"vda": (place, Disk.size, spec)})
        restored.commit(None)
        assert [device.read_bytes() == THEN[:MIB] + bytes(MIB) + THEN[2 * MIB :] + bytes(MIB)] == [True]
        # That all is done stays written until the run's own end.
        assert [entry.kind for entry in ledger.of(run.id)] == [in_place.RESTORED]
        assert ledger.sweep(run.id)
    assert zfs("list", "-Ho", "name", "-t", "all", "-r", volume).split() == [volume]
    assert store.ledgers.owned("run", host="local") == []
    store.close()
    zfs("destroy", volume)


def test_a_pool_without_room_beside_the_volumes_is_said_before_it_is_full(tmp_path: Path) -> None:
    """Their snapshots hold what they have: the restore ended when the pool was full, and so did the writes of other guests."""
    with small_pool("narrow", tmp_path / "pool.img"):
        places = []
        for name in ("one", "two"):
            zfs("create", "-s", "-V", str(SIZE), "-o", "volmode=dev", f"narrow/{name}")
            places.append(Place(Links().device(f"narrow/{name}"), "block"))
        half = int(zfs("get", "-Hpo", "value", "available", "narrow/one")) // 2 - MIB
        sizes = [("vda", places[0], half), ("vdb", places[1], half)]
        present.check_room(sizes)
        Path(places[0].path).write_bytes(NOW)
        zfs("snapshot", "narrow/one@written")  # once this is done, so is what it wrote
        with pytest.raises(DiskWriteFailed, match=r"disk vda and vdb would be .* bytes of one zfs pool, and .* are free"):
            present.check_room(sizes)
        zfs("destroy", "-r", "narrow/one")
        zfs("destroy", "-r", "narrow/two")
