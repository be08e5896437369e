"""Critical concerns refuse a plan at once, by E_MIG_INVALID_PLAN, unless it waives them by id."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from synvirt.errors import InvalidPlan
from synvirt.machines.concerns import with_room
from synvirt.migrations.planning.critical import refuse_critical
from synvirt.migrations.planning.foreseen import dry_run
from synvirt.model.kinds import State
from synvirt.model.machine import Concern, Disk, VmManifest
from synvirt.sizes import MIB, sized
from tests.fakes.live import FakeAdapter
from tests.fakes.workers import in_process
from tests.house import VM, House, live_plan, offline_plan
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


def test_a_critical_concern_that_only_the_job_sees_fails_it_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A platform that was away when the plan was submitted, or a VM that was changed since."""
    house = House(tmp_path, workers=in_process)
    house.platform.add_vm(VM, {"disk-0": bytes(MIB)})
    job = house.intake.submit(live_plan())
    inspect = FakeAdapter.inspect

    async def changed(adapter: FakeAdapter, vm_id: str) -> VmManifest:
        return (await inspect(adapter, vm_id)).model_copy(update={"concerns": (concern("shared-bus"),)})

    monkeypatch.setattr(FakeAdapter, "inspect", changed)
    ended = house.run(job.id)
    assert (ended.state, ended.passes) == (State.FAILED, ())
    assert ended.last_error is not None
    assert (ended.last_error.code, "shared-bus" in ended.last_error.message) == ("E_MIG_INVALID_PLAN", True)
    assert house.leftovers(VM) == []
    house.close()


# ── room ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_disks_that_cannot_fit_are_critical_and_sparse_ones_a_warning() -> None:
    disks = (
        Disk(key="a", label="a", capacity_bytes=100 * MIB, used_bytes=50 * MIB),
        Disk(key="b", label="b", capacity_bytes=100 * MIB),
    )
    manifest = VmManifest(vm_id="x", name="web", disks=disks)
    found = {free: [(one.id, one.category) for one in with_room(manifest, free * MIB).concerns] for free in (200, 199, 50, 49)}
    assert found == {
        200: [],
        199: [("target-may-fill", "Warning")],
        50: [("target-may-fill", "Warning")],
        49: [("target-too-small", "Critical")],
    }


def test_of_a_disk_of_which_nothing_is_known_one_block_is_written_at_least() -> None:
    """A destination with 0 bytes free takes no disk at all."""
    manifest = VmManifest(vm_id="x", name="web", disks=(Disk(key="a", label="a", capacity_bytes=100 * MIB),))
    found = {free: [one.id for one in with_room(manifest, free).concerns] for free in (4096, 4095, 0)}
    assert found == {4096: ["target-may-fill"], 4095: ["target-too-small"], 0: ["target-too-small"]}


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


def test_an_appliance_whose_description_does_not_say_how_much_it_holds_is_refused_by_its_own_tables(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its VMDK has grains of 64 KiB, and each has some data."""
    content = appliances.raw_disk(seed=0)
    grains = range(0, len(content), 64 << 10)
    holds = sum(64 << 10 for at in grains if any(content[at : at + (64 << 10)]))
    files = appliances.appliance("virtualbox")
    assert b"populatedSize" not in files["virtualbox.ovf"]
    path = appliances.folder(house.imports / "web", files)
    for free in (0, holds - 1):
        monkeypatch.setattr(house.destination, "free_bytes", lambda free=free: free)
        message = f"hold at least {sized(holds)}, and the destination has {sized(free)} free"
        with pytest.raises(InvalidPlan, match=f"target-too-small.*{message}"):
            house.intake.submit(offline_plan(path))
        [problem] = dry_run(house.rooms, offline_plan(path)).problems
        assert message in problem.detail
    monkeypatch.setattr(house.destination, "free_bytes", lambda: holds)
    assert dry_run(house.rooms, offline_plan(path)).problems == ()
    assert house.run(house.intake.submit(offline_plan(path)).id).state == State.COMPLETED
