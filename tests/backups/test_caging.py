"""Which cage an order of backups gets: the repository, the host's cache of it, and what the order names; and that it holds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from synvirt import programs
from synvirt.backups.orders import (
    CollectOrder,
    DiskToTake,
    MeasureOrder,
    ServeOrder,
    TakeOrder,
    VerifyPointOrder,
    ZfsChangesSpec,
)
from synvirt.backups.sources import zfs_stream
from synvirt.backups.worker.caging import (
    cage_of_collecting,
    cage_of_look,
    cage_of_measuring,
    cage_of_restore,
    cage_of_serving,
    cage_of_take,
)
from synvirt.backups.worker.tasks import TASKS
from synvirt.cage import Network
from synvirt.disks.specs import FileWriterSpec, NbdSpec, Qcow2WriterSpec, RawSpec, ReaderSpec
from synvirt.errors import DeltaFallback
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.repository.specs import FolderSpec, PeerSpec, PointSpec, RepositorySpec

# A key in base64 may begin like a path.
HERE = RepositorySpec(place=FolderSpec(path="/backups"), key="/etc/", cache="/data/backups/1.footers")
PEER = replace(HERE, place=PeerSpec(url="https://peer/", fingerprint_sha256="0", username="u", password="/etc/shadow"))
POINT = PointSpec(repository=HERE, point_id="p", number=0)
CACHE = "/data/backups"


def take(reader: ReaderSpec, repository: RepositorySpec = HERE, **more: Any) -> TakeOrder:
    disk = DiskToTake(key="a", reader=reader)
    return replace(TakeOrder(repository=repository, disks=(disk,), journal="/data/backups/j"), **more)


@pytest.mark.parametrize(
    ("reader", "repository", "reads", "network"),
    [
        (RawSpec(path="/vms/a"), HERE, {"/vms/a"}, Network.NONE),
        (NbdSpec(uri="nbd+unix:///x?socket=/run/n"), HERE, {"/run/n"}, Network.LOCAL),
        (RawSpec(path="/vms/a"), PEER, {"/vms/a"}, Network.ELSEWHERE),
        (NbdSpec(uri="nbd+unix:///x?socket=/run/n"), PEER, {"/run/n"}, Network.ANY),
    ],
)
def test_taking(reader: ReaderSpec, repository: RepositorySpec, reads: set[str], network: Network) -> None:
    cage = cage_of_take(take(reader, repository))
    own = {"/backups"} if repository is HERE else set()
    assert (set(cage.reads), set(cage.writes) - {"/dev/null"}, cage.network) == (reads, {CACHE} | own, network)
    assert (cage.files_as_service, cage.as_root, cage.programs) == (True, False, False)


def test_zfs_is_asked_before_the_cage_and_not_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream is read later: all of it, however long that takes, and no program is started for it then."""
    zfs = tmp_path / "zfs"
    zfs.write_text(f"""#!/bin/sh
echo "$1" >> {tmp_path}/asked
case "$1" in get) printf 'a@2\\t8\\na#1\\t7\\n' ;; send) head -c 300000 /dev/zero ;; esac
""")
    zfs.chmod(0o755)
    changes = ZfsChangesSpec(program=str(zfs), since="a#1", guid="7", until="a@2", size_bytes=512)
    disk = DiskToTake(key="a", reader=RawSpec(path="/dev/zvol/a"), changes=changes)
    order = TakeOrder(repository=HERE, disks=(disk,))
    cage = cage_of_take(order)
    assert (cage.reads, cage.programs, cage.files_as_service) == (("/dev/zvol/a",), False, True)
    begun = zfs_stream.send(changes)
    monkeypatch.setattr(programs, "forbidden", True)
    with pytest.raises(DeltaFallback, match="not a stream of a zfs volume"):
        list(zfs_stream.changed(begun))
    assert (tmp_path / "asked").read_text().split() == ["get", "send"]


def test_a_zfs_that_refuses_is_said_when_its_disk_is_read(tmp_path: Path) -> None:
    changes = ZfsChangesSpec(program=str(tmp_path / "nothing"), since="a#1", guid="7", until="a@2", size_bytes=512)
    refused = zfs_stream.send(changes)
    with pytest.raises(DeltaFallback, match=r"what changed since the bookmark a#1 is not known: .*not installed"):
        list(zfs_stream.changed(refused))


def test_looking_for_damage_writes_nothing_but_the_cache() -> None:
    cage = cage_of_look(VerifyPointOrder(repository=HERE, point_id="p"))
    assert (cage.reads, cage.writes, cage.network, cage.programs) == (("/backups",), (CACHE,), Network.NONE, False)
    assert cage_of_look(VerifyPointOrder(repository=PEER, point_id="p")).network is Network.ELSEWHERE


@pytest.mark.parametrize(("dry_run", "reads", "writes"), [(False, (), ("/backups", CACHE)), (True, ("/backups",), (CACHE,))])
def test_a_collection_writes_the_repository_unless_it_only_counts(
    dry_run: bool, reads: tuple[str, ...], writes: tuple[str, ...]
) -> None:
    cage = cage_of_collecting(CollectOrder(repository=HERE, dry_run=dry_run))
    assert (cage.reads, cage.writes, cage.network, cage.programs) == (reads, writes, Network.NONE, False)
    assert cage_of_collecting(CollectOrder(repository=PEER, dry_run=dry_run)).network is Network.ELSEWHERE


def test_serving_listens_in_its_folder() -> None:
    cage = cage_of_serving(ServeOrder(repository=HERE, point_id="p", sockets={0: "/run/s/0", 1: "/run/s/1"}))
    assert (cage.reads, set(cage.writes), cage.network) == (("/backups",), {"/run/s", CACHE}, Network.LOCAL)
    assert cage_of_serving(ServeOrder(repository=PEER, point_id="p", sockets={0: "/run/s/0"})).network is Network.ANY


def test_measuring_writes_nothing_but_the_cache() -> None:
    cage = cage_of_measuring(MeasureOrder(disks=(POINT, POINT)))
    assert (cage.reads, cage.writes, cage.network, cage.programs) == (("/backups",), (CACHE,), Network.NONE, False)


def test_restoring() -> None:
    to_file = DiskOrder(key="a", reader=POINT, writer=FileWriterSpec(path="/volumes/a", size_bytes=512))
    cage = cage_of_restore(CopyOrder(disks=(to_file,)))
    assert (cage.reads, set(cage.writes), cage.network, cage.programs) == (
        ("/backups",),
        {"/volumes/a", CACHE},
        Network.NONE,
        False,
    )
    to_qcow2 = DiskOrder(key="a", reader=POINT, writer=Qcow2WriterSpec(path="/exports/a.qcow2"))
    cage = cage_of_restore(CopyOrder(disks=(to_qcow2,)))
    assert (cage.network, cage.programs) == (Network.LOCAL, True)
    assert set(cage.writes) == {"/exports", "/exports/a.qcow2", CACHE}
    assert cage.temporary, "qemu-img connects to a socket"


def test_every_kind_of_order_has_a_cage() -> None:
    assert set(TASKS) == {"take", "verify_point", "verify_repository", "collect", "serve", "measure"}
    assert all(task.cage is not type(task).cage for task in TASKS.values())
