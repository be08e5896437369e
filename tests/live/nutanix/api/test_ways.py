"""The ways by which disks are read: NFS, iSCSI, images."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from synvirt.disks import open_reader
from synvirt.disks.specs import AllocatedSpec, ChangedSpec, DownloadSpec, IscsiSpec, NfsSpec
from synvirt.disks.vsphere.datastore import FileGone
from synvirt.errors import (
    AuthFailed,
    CbtReset,
    CbtUnsupported,
    DiskReadFailed,
    SnapshotFailed,
    SourceUnreachable,
)
from synvirt.live import SnapshotRef
from synvirt.live.nutanix import central, element, making, prism, volumes
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.model.machine import Disk, VmManifest
from tests.contracts.live import read
from tests.fakes.prism.lab import HERE
from tests.fakes.prism.nfs import nfs_server
from tests.fakes.prism.server import Prisms
from tests.fakes.prism.state import BLOCK
from tests.live.nutanix.api.lab import SIZE, ask, content, machine, opened


def test_zeros_are_never_read_and_reads_are_the_snapshots(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)
    spec = ask(by_nfs.access("element"), lambda adapter: opened(adapter, vm.id))
    assert isinstance(spec, AllocatedSpec)
    copy, data_bytes = read(spec, os.urandom(SIZE))
    assert copy == content()
    assert data_bytes == 11 << 18


def test_a_delta_says_what_became_zero_and_does_not_read_it(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)

    async def use(adapter: PrismApi) -> Any:
        first = await adapter.snapshot(vm.id, "synvirt-a-1")
        by_nfs.state.guest_writes(vm.id, "scsi.0", 0, bytes(BLOCK))
        by_nfs.state.guest_writes(vm.id, "scsi.0", 5 * BLOCK, b"new")
        return await opened(adapter, vm.id, "synvirt-a-2", first.change_ids["scsi.0"])

    spec = ask(by_nfs.access("element"), use)
    assert isinstance(spec, ChangedSpec)
    copy, data_bytes = read(spec, content())
    assert copy == by_nfs.state.path(vm.disks[0]).read_bytes()
    assert data_bytes == BLOCK


def test_a_disk_that_became_another_file_is_no_delta(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)

    async def use(adapter: PrismApi) -> None:
        first = await adapter.snapshot(vm.id, "synvirt-a-1")
        old, vm.disks[0].id = by_nfs.state.path(vm.disks[0]), "0" * 8 + vm.disks[0].id[8:]
        old.rename(by_nfs.state.path(vm.disks[0]))
        await opened(adapter, vm.id, "synvirt-a-2", first.change_ids["scsi.0"])

    with pytest.raises(CbtReset, match="not the same file"):
        ask(by_nfs.access("element"), use)


def test_a_guest_is_quiet_for_its_snapshot_where_it_can_be(by_nfs: Prisms) -> None:
    """And as after a crash, where that fails."""
    vm = machine(by_nfs, tools=True)
    ask(by_nfs.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-1"))
    vm.tools = False
    ask(by_nfs.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-2"))
    vm.tools = True
    by_nfs.fault("POST .*/vm_snapshots$", "422")
    ask(by_nfs.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-3"))
    kinds = {one.name: one.kind for one in by_nfs.state.kept.values()}
    assert [kinds[f"synvirt-a-{number}"] for number in (1, 2, 3)] == ["APPLICATION_CONSISTENT", *["CRASH_CONSISTENT"] * 2]


def test_snapshots_expire_by_themselves_where_nobody_comes_back(by_nfs: Prisms) -> None:
    vm = machine(by_nfs)
    ask(by_nfs.access("element", expire_days=2), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-1"))
    expires = next(iter(by_nfs.state.kept.values())).expires
    assert 0 < expires / 1000 - time.time() < 2.1 * 86400


def test_a_token_that_runs_out_in_the_middle_is_fetched_again(by_iscsi: Prisms) -> None:
    """And the answer's pages go on where they were."""
    by_iscsi.central.token_uses = 1
    vm = by_iscsi.state.add_vm("web", {"scsi.0": b"".join((os.urandom(BLOCK), bytes(BLOCK))[part % 2] for part in range(40))})
    spec = ask(by_iscsi.access(transport="iscsi"), lambda adapter: opened(adapter, vm.id))
    copy, data_bytes = read(spec, os.urandom(40 * BLOCK))
    assert copy == by_iscsi.state.path(vm.disks[0]).read_bytes()
    assert data_bytes == 20 * BLOCK
    discovered = [one for one in by_iscsi.seen if one.endswith("discover-cluster")]
    assert len(discovered) == 5
    ask(by_iscsi.access(transport="iscsi"), lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert by_iscsi.names() == []


def test_a_cluster_that_is_away_costs_a_cold_copy_its_holes_and_ends_a_warm_one(by_iscsi: Prisms) -> None:
    """It alone tells what changed: a job that cannot ask it is to say so before it has copied for hours."""
    vm = machine(by_iscsi)
    by_iscsi.central.element_address = "127.0.0.3"  # nothing listens there
    access = by_iscsi.access("central", transport="iscsi")
    with pytest.raises(SourceUnreachable, match=r"127\.0\.0\.3 port 9440") as failure:
        ask(access, lambda adapter: opened(adapter, vm.id))
    assert "TCP 9440" in (failure.value.hint or "")
    vm.power = "OFF"
    assert isinstance(ask(access, lambda adapter: opened(adapter, vm.id)), IscsiSpec)
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert by_iscsi.names() == []


def test_the_cluster_may_serve_another_revision_than_its_central(by_iscsi: Prisms) -> None:
    by_iscsi.central.content_version = "v4.0"
    vm = machine(by_iscsi)
    spec = ask(by_iscsi.access(transport="iscsi"), lambda adapter: opened(adapter, vm.id))
    assert isinstance(spec, AllocatedSpec)
    assert any("/api/dataprotection/v4.0/content" in one for one in by_iscsi.seen)


@pytest.mark.parametrize("which", ["central", "element"])
def test_a_vm_that_is_off_is_read_by_images_where_no_better_way_is_open(cluster: Prisms, which: str) -> None:
    vm = machine(cluster, power="OFF")
    access = cluster.access(which)

    async def use(adapter: PrismApi) -> tuple[VmManifest, Any]:
        manifest = await adapter.inspect(vm.id)
        spec = await opened(adapter, vm.id)
        with pytest.raises(CbtUnsupported):
            await adapter.enable_cbt(vm.id, ["scsi.0"])
        return manifest, spec

    manifest, spec = ask(access, use)
    assert isinstance(spec, DownloadSpec)
    assert "s3cret" not in repr(spec)
    assert not manifest.cbt_available
    assert "image download cannot report changes" in str(manifest.cbt_reason)
    assert "by an image" in manifest.concerns[0].assessment
    assert read(spec)[0] == content()
    assert cluster.names() == ["image synvirt-a-1 sata.1", "image synvirt-a-1 scsi.0"]
    ask(access, lambda adapter: adapter.cleanup(vm.id, "synvirt-a-1"))
    assert cluster.names() == []


def test_an_image_of_a_vm_that_runs_is_refused(cluster: Prisms) -> None:
    vm = machine(cluster)
    with pytest.raises(SnapshotFailed, match="is on"):
        ask(cluster.access("element"), lambda adapter: adapter.snapshot(vm.id, "synvirt-a-1"))
    assert cluster.names() == []


def test_a_download_that_is_cut_says_where(cluster: Prisms) -> None:
    vm = machine(cluster, power="OFF")
    spec = ask(cluster.access("element"), lambda adapter: opened(adapter, vm.id))
    image = next(one for one in cluster.state.images.values() if one.name.endswith("scsi.0"))
    image.path.write_bytes(image.path.read_bytes()[:-5])
    with pytest.raises(DiskReadFailed, match="sends 4194299 bytes"):
        open_reader(spec)
    image.path.unlink()
    del cluster.state.images[image.id]
    with pytest.raises(DiskReadFailed, match="404"):
        open_reader(spec)


def test_a_way_that_the_operator_chose_and_that_is_not_open_is_reported_before_the_job(cluster: Prisms) -> None:
    vm = machine(cluster)
    manifest = ask(cluster.access("central", transport="nfs"), lambda adapter: adapter.inspect(vm.id))
    assert (manifest.concerns[0].category, manifest.cbt_available) == ("Critical", False)
    assert "no Prism Element is named" in manifest.concerns[0].assessment


def test_a_file_that_goes_while_it_is_read_is_reported_and_does_not_hang(by_nfs: Prisms) -> None:
    """Its export goes, and with it the handle that we read by."""
    vm = machine(by_nfs)
    spec = ask(by_nfs.access("element"), lambda adapter: opened(adapter, vm.id))
    assert isinstance(spec, AllocatedSpec)
    assert isinstance(spec.over, NfsSpec)
    with pytest.raises(FileGone, match="No such file"):
        open_reader(replace(spec.over, path=f"{spec.over.path}x"))
    reader = open_reader(spec)
    reader.read_into(0, memoryview(bytearray(4096)))
    kept = by_nfs.state.containers.pop("default")
    by_nfs.state.on_list()
    try:
        with pytest.raises((FileGone, AuthFailed)):
            reader.read_into(0, memoryview(bytearray(4096)))
    finally:
        by_nfs.state.containers["default"] = kept
        reader.close()


@pytest.mark.parametrize("transport", ["auto", "nfs", "image"])
def test_what_another_way_left_goes_too(by_iscsi: Prisms, transport: str) -> None:
    """An operator whose iSCSI is broken chooses another way while a job is at it."""
    vm, name = machine(by_iscsi), "synvirt-a-1"
    ask(by_iscsi.access(transport="iscsi"), lambda adapter: opened(adapter, vm.id, name))
    assert by_iscsi.names() == [f"group {name}", name]
    ask(by_iscsi.access(transport=transport), lambda adapter: adapter.cleanup(vm.id, name))
    assert by_iscsi.names() == []


@pytest.mark.parametrize(("made_at", "asked", "left"), [("element", "central", "element"), ("central", "element", "central")])
def test_a_snapshot_on_a_prism_that_is_named_no_more_is_owed(
    by_iscsi: Prisms, tmp_path: Path, made_at: str, asked: str, left: str
) -> None:
    """Where the operator takes it out of the source, the cleanup found nothing, and the snapshot was forgotten."""
    vm, name, folder = machine(by_iscsi), "synvirt-a-1", tmp_path / "adapter"
    by_iscsi.state.cluster_list.append(HERE)
    with nfs_server(tmp_path / "nfs", by_iscsi.state) as by_iscsi.nfs_ports:
        way = "nfs" if made_at == "element" else "iscsi"
        ask(by_iscsi.access(transport=way, folder=folder), lambda adapter: adapter.snapshot(vm.id, name))
    with pytest.raises(SourceUnreachable, match=f"is on a Prism {left.title()}"):
        ask(by_iscsi.access(asked, folder=folder), lambda adapter: adapter.cleanup(vm.id, name))
    assert by_iscsi.names() == [name]
    ask(by_iscsi.access(folder=folder), lambda adapter: adapter.cleanup(vm.id, name))
    assert (by_iscsi.names(), list(folder.iterdir())) == ([], [])
    ask(by_iscsi.access(asked, folder=folder), lambda adapter: adapter.cleanup(vm.id, name))


def test_a_snapshot_on_a_prism_element_that_lists_none_now_is_owed(by_nfs: Prisms, tmp_path: Path) -> None:
    """It answers as Prism Central does while its services start."""
    vm, name, access = machine(by_nfs), "synvirt-a-1", by_nfs.access(folder=tmp_path / "adapter")
    ask(access, lambda adapter: adapter.snapshot(vm.id, name))
    by_nfs.fault("POST /api/nutanix/v3/vm_snapshots/list", "404")
    with pytest.raises(SourceUnreachable, match="lists no snapshots now"):
        ask(access, lambda adapter: adapter.cleanup(vm.id, name))
    ask(access, lambda adapter: adapter.cleanup(vm.id, name))
    assert by_nfs.names() == []


def test_a_recovery_point_on_a_prism_central_that_serves_no_volumes_now_is_owed(by_iscsi: Prisms, tmp_path: Path) -> None:
    """One of its services starts later than the others: its recovery points and volume groups are there all the same."""
    vm, name, access = machine(by_iscsi), "synvirt-a-1", by_iscsi.access(transport="iscsi", folder=tmp_path / "adapter")
    ask(access, lambda adapter: adapter.snapshot(vm.id, name))
    by_iscsi.fault("central .* /api/volumes/", "404", times=1000)
    with pytest.raises(SourceUnreachable, match="serves no v4 API of volumes"):
        ask(access, lambda adapter: adapter.cleanup(vm.id, name))
    by_iscsi.faults.clear()
    ask(access, lambda adapter: adapter.cleanup(vm.id, name))
    assert (by_iscsi.names(), list((tmp_path / "adapter").iterdir())) == ([], [])


class Killed(BaseException):
    pass


@pytest.mark.parametrize(
    ("made_by", "which", "transport", "left"),
    [
        ("make_point", "central", "iscsi", "synvirt-a-1"),
        ("make_point, its task unknown", "central", "iscsi", "synvirt-a-1"),
        ("make_group, its task unknown", "central", "iscsi", "group synvirt-a-1"),
        ("make_image, its task unknown", "central", "image", "image synvirt-a-1 sata.1"),
        ("make_group", "central", "iscsi", "group synvirt-a-1"),
        ("make_image", "central", "image", "image synvirt-a-1 sata.1"),
        ("make_image", "element", "image", "image synvirt-a-1 sata.1"),
    ],
)
def test_what_is_still_being_made_is_removed_once_it_is_made(
    by_iscsi: Prisms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_by: str, which: str, transport: str, left: str
) -> None:
    """Prism lists it only then: a cleanup before that would find nothing, and it would stay; a recovery point until it
    expires, all others for good. Also where the service is killed before it knows the task."""
    made_by, _, unknown = made_by.partition(", ")
    vm, name = machine(by_iscsi, power="OFF"), "synvirt-a-1"
    del vm.disks[0]
    access = by_iscsi.access(which, transport=transport, folder=tmp_path / "adapter")
    server: Any = getattr(by_iscsi, which)
    make, task = getattr(server, made_by), server.task
    asked: list[dict[str, Any]] = []

    def begin(**order: Any) -> Any:
        asked.append(order)
        if which == "central":
            return server._did("Create", order["headers"])
        status = {
            "state": "PENDING",
            "name": name,
            "resources": {},
            "execution_context": {"task_uuid": server.state.task("image")},
        }
        return 202, {"api_version": "3.1", "metadata": {"kind": "image", "uuid": vm.id}, "status": status}

    def running(id_: str, **more: Any) -> Any:
        server.state.tasks[id_]["looks"] = 0
        return task(id_, **more)

    def killed(_: float) -> None:
        raise Killed

    if made_by == "make_group":
        ask(access, lambda adapter: adapter.snapshot(vm.id, name))
    with monkeypatch.context() as patched:
        patched.setattr(server, made_by, begin)
        patched.setattr(server, "task", running)
        patched.setattr(making, "MAKING_S", 0.2)
        with patched.context() as while_it_is_made:
            while_it_is_made.setattr(central, "pauses", killed)
            while_it_is_made.setattr(element, "pauses", killed)
            if unknown:
                while_it_is_made.setattr(making.Making, "note", lambda *_: killed(0))
            with pytest.raises(Killed):
                ask(access, lambda adapter: opened(adapter, vm.id, name))
        with pytest.raises(SourceUnreachable, match="still making"):
            ask(access, lambda adapter: adapter.cleanup(vm.id, name))
    make(**asked[0])
    assert left in by_iscsi.names()
    ask(access, lambda adapter: adapter.cleanup(vm.id, name))
    assert by_iscsi.names() == []
    assert not list((tmp_path / "adapter").iterdir())


@pytest.mark.parametrize("refused", [False, True])
def test_what_was_never_asked_for_is_not_left_by_its_cleanup(
    by_iscsi: Prisms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """A service that is killed just before its request cannot know that it was not sent."""
    vm, name = machine(by_iscsi, power="OFF"), "synvirt-a-1"
    access, whole = by_iscsi.access(transport="iscsi", folder=tmp_path / "adapter"), prism.Prism.ask

    def unsent(self: prism.Prism, method: str, path: str, **more: Any) -> Any:
        if (method, path.rpartition("/")[2]) == ("POST", "recovery-points"):
            raise Killed
        return whole(self, method, path, **more)

    with monkeypatch.context() as patched:
        patched.setattr(prism.Prism, "ask", unsent)
        with pytest.raises(Killed):
            ask(access, lambda adapter: adapter.snapshot(vm.id, name))
    if refused:
        del by_iscsi.state.vms[vm.id]
    ask(access, lambda adapter: adapter.cleanup(vm.id, name))
    assert (by_iscsi.names(), list((tmp_path / "adapter").iterdir())) == ([], [])


def test_a_recovery_point_that_is_gone_or_of_no_disk_is_said_before_anything_is_made() -> None:
    """The pass takes another snapshot where it is gone, and compares the whole disk where the change id means nothing."""

    def gone(_: str) -> None:
        raise SnapshotFailed("it is gone")

    vm: Any = SimpleNamespace(name="web")
    disk = Disk(key="scsi.0", label="disk", capacity_bytes=BLOCK)
    known = SnapshotRef(id=f"{volumes.PREFIX}p", change_ids={disk.key: "p/v/d"})
    for point, since, error in ((gone, None, SnapshotFailed), (str, "p/v", CbtReset), (str, "", CbtReset)):
        ways = volumes.Volumes(cast(Any, SimpleNamespace(point=point)), cast(Any, None), cast(Any, None))
        with pytest.raises(error):
            ways.open(vm, "synvirt-job-2", known, disk, since)
