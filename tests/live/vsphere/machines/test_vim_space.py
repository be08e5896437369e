"""What disks and snapshots take on a datastore, as the manifest reports it: made of pyvmomi's own types."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from pyVmomi import vim

from synvirt.live.vsphere.machines import manifest
from synvirt.live.vsphere.ways import Way
from tests.live.vsphere.machines.made import Backing, a_disk, a_file, critical, described, found


@pytest.mark.parametrize(
    ("snapshots", "left", "reported"),
    [(0, False, True), (1, False, False), (0, True, False)],
    ids=["clone", "snapshot", "left"],
)
def test_a_linked_clone_is_reported_and_one_with_a_snapshot_is_none(snapshots: int, left: bool, reported: bool) -> None:
    base = Backing(fileName="[ds1] master/master.vmdk")
    tree = vim.vm.SnapshotTree(
        snapshot=vim.vm.Snapshot("snapshot-1"), name="mine", createTime=datetime(2026, 1, 1, tzinfo=UTC), childSnapshotList=[]
    )
    one = described(
        a_disk(backing=Backing(fileName="[ds1] web/web.vmdk", parent=base)),
        snapshot__rootSnapshotList=[tree] * snapshots,
        runtime__consolidationNeeded=left,
    )
    assert ("vim.linked_clone" in [concern.id for concern in one.concerns]) == reported
    assert critical(one) == []


@pytest.mark.parametrize(("days", "reported"), [(6, False), (40, True)])
def test_snapshots_that_are_old_are_reported_with_their_age(days: int, reported: bool) -> None:
    """The old one lies over another, in its tree: both are looked at."""
    now = datetime(2026, 3, 1, tzinfo=UTC)
    tree = [
        vim.vm.SnapshotTree(
            snapshot=vim.vm.Snapshot("snapshot-1"),
            name="new",
            createTime=now - timedelta(hours=1),
            childSnapshotList=[
                vim.vm.SnapshotTree(
                    snapshot=vim.vm.Snapshot("snapshot-2"),
                    name="before the update",
                    createTime=now - timedelta(days=days),
                    childSnapshotList=[],
                )
            ],
        )
    ]
    one = manifest(
        "vm-1", found(a_disk(), snapshot__rootSnapshotList=tree), {"ds1": "VMFS"}, {"2000": Way("datastore")}, now=now
    )
    concerns = [one for one in one.concerns if one.id == "vim.old_snapshots"]
    assert ["«before the update» (40 days)" in one.assessment and "new" not in one.assessment for one in concerns] == [
        True
    ] * reported


@pytest.mark.parametrize(
    ("files", "allocated"),
    [
        ({"web-flat.vmdk": 100, "web-000001-sesparse.vmdk": 20}, 120),
        ({"web-flat.vmdk": 100, "web-000001-delta.vmdk": 20, "other-flat.vmdk": 7}, 120),
        ({"web-flat.vmdk": 1 << 30, "web-000001-delta.vmdk": 20}, 1 << 30),
        ({"web-flat.vmdk": 100}, None),
        ({}, None),
    ],
)
def test_what_is_allocated_of_a_disk_is_what_all_its_files_take(files: dict[str, int], allocated: int | None) -> None:
    over = Backing(fileName="[ds1] web/web-000001.vmdk", parent=Backing(fileName="[ds1] web/web.vmdk"))
    listed = [a_file(name, size) for name, size in files.items()]
    assert described(a_disk(backing=over), layoutEx__file=listed).disks[0].used_bytes == allocated


@pytest.mark.parametrize(
    ("sizes", "free", "reported"),
    [
        (
            {"web-flat.vmdk": 100 << 30, "web-000001-sesparse.vmdk": 60 << 30},
            80,
            "writes 60.0 GiB again, expected to take 5 min to 34 min",
        ),
        ({"web-flat.vmdk": 100 << 30, "web-000001-delta.vmdk": 1 << 30}, None, "for up to 1.0 GiB on ds1."),
        ({"web-flat.vmdk": 100 << 30}, 80, "may take hours"),
    ],
)
def test_the_removal_of_old_snapshots_is_reported_with_its_time_and_room(
    sizes: dict[str, int], free: int | None, reported: str
) -> None:
    now = datetime(2026, 3, 1, tzinfo=UTC)
    kept = vim.vm.SnapshotTree(
        snapshot=vim.vm.Snapshot("snapshot-1"), name="old", createTime=now - timedelta(days=400), childSnapshotList=[]
    )
    over = Backing(fileName="[ds1] web/web-000001.vmdk", parent=Backing(fileName="[ds1] web/web.vmdk"))
    fields = {
        "snapshot__rootSnapshotList": [kept],
        "layoutEx__file": [a_file(name, size) for name, size in sizes.items()],
        "runtime__consolidationNeeded": True,
    }
    space = {} if free is None else {"ds1": (free << 30, 200 << 30)}
    ways = {"2000": Way("datastore")}
    one = manifest("vm-1", found(a_disk(backing=over), **fields), {"ds1": "VMFS"}, ways, now=now, space=space)
    for id_ in ("vim.old_snapshots", "vim.consolidation"):  # whose removal writes the same files again
        assessment = next(concern.assessment for concern in one.concerns if concern.id == id_)
        assert reported in assessment
        assert ("(80.0 GiB are free)" in assessment) == (free is not None and len(sizes) > 1)


EMPTY = {"layoutEx__file": [a_file("web-flat.vmdk", 3 << 30)]}


@pytest.mark.parametrize(
    ("fields", "way_", "may_export", "reported"),
    [
        ({}, Way("datastore"), True, "reads what is allocated alone, by an export lease"),
        ({}, Way("datastore"), False, "lacks the privilege VApp.Export"),
        ({}, Way("datastore", chosen=True), True, "options.transport"),
        ({}, Way("vddk"), True, None),
        ({}, Way("lease"), True, None),
        ({"layoutEx__file": [a_file("web-flat.vmdk", 6 << 30)]}, Way("datastore"), True, None),
        ({"layoutEx__file": []}, Way("datastore"), True, None),
        ({"config__hardware__device": None}, Way("datastore"), True, None),
    ],
)
def test_what_a_cold_copy_of_a_mostly_empty_disk_will_read(
    fields: dict[str, Any], way_: Way, may_export: bool, reported: str | None
) -> None:
    disk = a_disk()
    disk.capacityInBytes = 10 << 30
    one = manifest("vm-1", found(disk, **EMPTY | fields), {"ds1": "VMFS"}, {"2000": way_}, may_export=may_export)
    concerns = [concern for concern in one.concerns if concern.id == "vim.mostly_empty"]
    assert bool(concerns) == (reported is not None)
    for concern in concerns:
        assert str(reported) in concern.assessment
        assert f"{3 << 30} of {10 << 30} bytes of Hard disk 1" in concern.assessment
    disk.backing.changeId = "52 de/1"
    tracked = manifest("vm-1", found(disk, **EMPTY | fields), {"ds1": "VMFS"}, {"2000": way_}, may_export=may_export)
    assert "vim.mostly_empty" not in [concern.id for concern in tracked.concerns]


@pytest.mark.parametrize(
    ("free", "reported"), [(1 << 20, True), ((1 << 30) - 1, True), (1 << 30, False), (9 << 30, False), (None, False)]
)
def test_a_datastore_that_a_snapshot_may_fill_is_reported_before(free: int | None, reported: bool) -> None:
    """Of 20 GiB, over one disk of 1 GiB: a snapshot takes no more."""
    disks, ways = [a_disk(2000), a_disk(2001, Backing(fileName="[ds2] a/a.vmdk"))], {"2000": Way("vddk"), "2001": Way("vddk")}
    space = {} if free is None else {"ds1": (free, 20 << 30), "ds2": (2 << 30, 20 << 30), "other": (0, 1)}
    one = manifest("vm-1", found(*disks), {}, ways, space=space)
    concerns = [concern for concern in one.concerns if concern.id.startswith("vim.store_full")]
    assert [concern.id for concern in concerns] == (["vim.store_full:ds1"] if reported else [])
    assert all(concern.category == "Warning" and str(free) in concern.assessment for concern in concerns)
