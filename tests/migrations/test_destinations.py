"""Which destination a job's volumes go to."""

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.destinations.directory import DirectoryDestination
from synvirt.destinations.zfs import ZfsDestination
from synvirt.destinations.zfs_command import Zfs
from synvirt.disks.roots import Root
from synvirt.errors import DiskWriteFailed, InvalidPlan
from synvirt.migrations.intake import check_plan
from synvirt.migrations.job import volume_label
from synvirt.model.kinds import State
from synvirt.model.machine import Disk, VmManifest
from synvirt.offline.browsing import inspect
from tests.cases import cases
from tests.fakes.offline import FakeImporter
from tests.fakes.zfs import FakeZfs
from tests.house import Crash, House, crash_at, offline_plan
from tests.offline import appliances

DISK = b"disk" * 50_000


def appliance(house: House) -> Path:
    folder = house.imports / "appliance"
    folder.mkdir()
    (folder / "disk-0.raw").write_bytes(DISK)
    return folder


def archive(folder: Path) -> DirectoryDestination:
    (folder / "archive").mkdir(exist_ok=True)
    return DirectoryDestination(folder / "archive")


def test_a_plan_may_name_its_destination(tmp_path: Path) -> None:
    house = House(tmp_path, others={"archive": archive(tmp_path)})
    plan = offline_plan(appliance(house), target={"destination": "archive"})
    job = house.run(house.intake.submit(plan).id)
    assert (job.state, job.destination) == (State.COMPLETED, "archive")
    assert job.disks[0].volume is not None
    assert (tmp_path / "archive" / job.disks[0].volume).read_bytes() == DISK
    assert list((tmp_path / "volumes").iterdir()) == []
    house.close()


def test_no_two_disks_share_a_volume_whatever_they_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are called the same, so that their keys are added; a third is called just that."""
    house, real = House(tmp_path), FakeImporter.inspect
    contents = {key: key.encode() * 50_000 for key in ("k1", "k2", "k3")}
    (folder := house.imports / "named").mkdir()
    for key, content in contents.items():
        (folder / f"{key}.raw").write_bytes(content)

    def inspected(importer: FakeImporter, path: Path, root: Root) -> VmManifest:
        manifest = real(importer, path, root)
        labels = {"k1": "data", "k2": "data", "k3": "data k1"}
        return manifest.model_copy(
            update={"disks": tuple(disk.model_copy(update={"label": labels[disk.key]}) for disk in manifest.disks)}
        )

    monkeypatch.setattr(FakeImporter, "inspect", inspected)
    job = house.run(house.intake.submit(offline_plan(folder)).id)
    assert job.state is State.COMPLETED
    assert {disk.key: (tmp_path / "volumes" / (disk.volume or "")).read_bytes() for disk in job.disks} == contents
    house.close()


@given(st.lists(st.tuples(*[st.text("ab ", max_size=4)] * 2), min_size=1, max_size=6, unique_by=lambda pair: pair[0]))
@cases(100)
def test_labels_of_volumes_differ(disks: list[tuple[str, str]]) -> None:
    manifest = VmManifest(
        vm_id="x", name="x", disks=tuple(Disk(key=key, label=label, capacity_bytes=1) for key, label in disks)
    )
    assert len({volume_label(disk, manifest) for disk in manifest.disks}) == len(disks)


def test_one_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    house = House(tmp_path, others={"archive": archive(tmp_path)})
    plan = offline_plan(appliance(house), target={"destination": "nowhere"})
    with pytest.raises(InvalidPlan, match="no destination called 'nowhere'") as caught:
        check_plan(house.rooms, plan)
    assert caught.value.hint == "there is chosen, archive"
    house.close()


def test_a_job_keeps_its_destination_when_the_default_changes(tmp_path: Path) -> None:
    house = House(tmp_path)
    job = house.intake.submit(offline_plan(appliance(house)))
    house.store.on_commit = crash_at(4)
    with pytest.raises(Crash):
        house.run(job.id)
    house.close()
    first = DirectoryDestination(tmp_path / "volumes")
    # The service starts again with other settings: what was the default is one among others.
    again = House(tmp_path, destination=archive(tmp_path), others={})
    destinations = {"fast": archive(tmp_path), "chosen": first}
    object.__setattr__(again.rooms, "destinations", destinations)
    ended = again.run(job.id)
    assert (ended.state, ended.destination) == (State.COMPLETED, "chosen")
    assert ended.disks[0].volume is not None
    assert Path(first.device(ended.disks[0].volume)).read_bytes() == DISK
    assert list((tmp_path / "archive").iterdir()) == []
    again.close()


class Away(DirectoryDestination):
    def free_bytes(self) -> int:
        raise DiskWriteFailed("this host has no zfs pool tank")


def test_one_that_is_away_refuses_plans_at_once_but_no_look_at_a_file(tmp_path: Path) -> None:
    house = House(tmp_path, others={"away": Away(tmp_path)}, real_importers=True)
    path = house.imports / "disk.qcow2"
    subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", path, "1M"], check=True)
    with pytest.raises(DiskWriteFailed, match="no zfs pool"):
        check_plan(house.rooms, offline_plan(path, kind="qcow2", target={"destination": "away"}))
    check_plan(house.rooms, offline_plan(path, kind="qcow2"))
    seen = inspect(house.imports, str(path), free_bytes=Away(tmp_path).free_bytes)
    assert seen.manifest.disks[0].capacity_bytes == 1 << 20
    house.close()


def test_a_zfs_pool_that_is_too_small_is_found_before_anything_is_made(tmp_path: Path) -> None:
    """The disk uses 2,621,440 bytes. The pool has a few more, but not what zfs takes for itself beside them."""
    fake = FakeZfs(tmp_path / "zfs", pools={"tank": 2_700_000})
    zfs = ZfsDestination("tank", "synvirt", zfs=Zfs(fake.program), devices=fake.devices, name_of=fake.name_of)
    house = House(tmp_path, destination=zfs, real_importers=True)
    path = appliances.folder(house.imports / "web", appliances.appliance("ovftool"))
    with pytest.raises(InvalidPlan, match=r"target-too-small.* hold at least 2\.5 MiB, .* has 2\.4 MiB free"):
        house.intake.submit(offline_plan(path, skip_disks=["vmdisk2"]))
    assert list(fake.datasets()) == ["tank"]
    house.close()
