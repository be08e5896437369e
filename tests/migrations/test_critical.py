"""Critical concerns refuse a plan at once, by E_MIG_INVALID_PLAN, unless it waives them by id."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import InvalidPlan
from synvirt.machines.concerns import with_room
from synvirt.migrations.planning.critical import refuse_critical
from synvirt.model.kinds import State
from synvirt.model.machine import Concern, Disk, VmManifest
from tests.house import House, offline_plan
from tests.offline import appliances


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path, real_importers=True)
    yield made
    made.close()


@pytest.fixture
def half_readable(house: House) -> Path:
    """An appliance of two disks, of which the second only says what differs from a third."""
    files = appliances.appliance("ovftool")
    text = files["ovftool.ovf"].replace(b'ovf:fileRef="file2"', b'ovf:fileRef="file2" ovf:parentRef="vmdisk0"')
    assert text != files["ovftool.ovf"]
    text = text.replace(b'ovf:id="112"', b'ovf:id="96"').replace(b"windows2019srv_64Guest", b"debian12_64Guest")
    text = text.replace(b"Microsoft Windows Server 2019 (64-bit)", b"Debian")
    return appliances.folder(
        house.imports / "web", {"a.ovf": text, **{name: files[name] for name in ("disk1.vmdk", "disk2.vmdk")}}
    )


def test_a_critical_concern_refuses_the_plan_before_there_is_a_job(house: House, half_readable: Path) -> None:
    with pytest.raises(InvalidPlan, match="disk-unreadable:vmdisk2") as refused:
        house.intake.submit(offline_plan(half_readable))
    assert "waive_concerns" in (refused.value.hint or "")
    assert house.store.documents(limit=10)[0] == []


def test_a_disk_that_is_left_out_refuses_nothing(house: House, half_readable: Path) -> None:
    job = house.run(house.intake.submit(offline_plan(half_readable, skip_disks=["vmdisk2"])).id)
    assert job.state == State.COMPLETED, job.last_error
    assert [disk.state for disk in job.disks] == ["copied", "skipped"]


def test_a_concern_that_is_waived_refuses_nothing(house: House, half_readable: Path) -> None:
    """What it warned of happens then, and is told as what it is."""
    job = house.run(house.intake.submit(offline_plan(half_readable, waive_concerns=["disk-unreadable:vmdisk2"])).id)
    assert job.state == State.FAILED
    assert job.last_error is not None
    assert job.last_error.code == "E_MIG_UNSUPPORTED_FORMAT"
    assert house.leftovers() == []


def test_waiving_one_waives_no_other(house: House) -> None:
    path = house.imports / "a.ovf"
    path.write_bytes(appliances.description("cdrom_only"))
    with pytest.raises(InvalidPlan, match="no-disks"):
        house.intake.submit(offline_plan(path, waive_concerns=["disk-unreadable:x", "secure-boot"]))


def concern(id_: str, category: str = "Critical") -> Concern:
    return Concern.model_validate({"id": id_, "category": category, "label": "l", "assessment": "a", "remedy": "r"})


@pytest.mark.parametrize(
    ("ids", "fields", "refused"),
    [
        (["a"], {}, ["a"]),
        (["a", "b"], {"waive_concerns": ["a"]}, ["b"]),
        (["a", "b"], {"waive_concerns": ["a", "b"]}, []),
        (["disk-unreadable:k"], {"skip_disks": ["k"]}, []),
        (["disk-unreadable:k:0"], {"skip_disks": ["k"]}, ["disk-unreadable:k:0"]),
        (["disk-unreadable:scsi0:0"], {"skip_disks": ["scsi0:0"]}, []),
        (["other:k"], {"skip_disks": ["k"]}, ["other:k"]),
    ],
)
def test_which_concerns_refuse(ids: list[str], fields: dict[str, Any], refused: list[str]) -> None:
    manifest = VmManifest(vm_id="x", name="web", concerns=(*map(concern, ids), concern("w", "Warning")))
    plan = offline_plan(Path("/x"), **fields)
    if not refused:
        refuse_critical(plan, manifest)
        return
    with pytest.raises(InvalidPlan, match=rf"web has {len(refused)} critical concerns?: {', '.join(refused)}\. l: a"):
        refuse_critical(plan, manifest)


# ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_disks_that_cannot_fit_are_critical_and_sparse_ones_a_warning() -> None:
    disks = (
        Disk(key="a", label="a", capacity_bytes=100, used_bytes=50),
        Disk(key="b", label="b", capacity_bytes=100),
    )
    manifest = VmManifest(vm_id="x", name="web", disks=disks)
    found = {free: [(one.id, one.category) for one in with_room(manifest, free).concerns] for free in (200, 199, 50, 49)}
    assert found == {
        200: [],
        199: [("target-may-fill", "Warning")],
        50: [("target-may-fill", "Warning")],
        49: [("target-too-small", "Critical")],
    }


def test_a_plan_whose_disks_cannot_fit_is_refused_unless_they_are_left_out(
    house: House, half_readable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first disk's description says that it uses 2.5 MiB; the second's says nothing."""
    monkeypatch.setattr(house.destination, "free_bytes", lambda: 1 << 20)
    with pytest.raises(InvalidPlan, match="target-too-small"):
        house.intake.submit(offline_plan(half_readable, skip_disks=["vmdisk2"]))
    job = house.run(
        house.intake.submit(offline_plan(half_readable, skip_disks=["vmdisk2"], waive_concerns=["target-too-small"])).id
    )
    assert job.state == State.COMPLETED, job.last_error
