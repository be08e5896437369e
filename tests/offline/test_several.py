"""Packages with several VMs: one is chosen, by its name or its id, and only its disks come along."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from synvirt.errors import BadRequest, UnsupportedFormat, VmNotFound
from synvirt.model.kinds import State
from synvirt.offline.registry import detect
from synvirt.offline.several import choosing
from tests.house import House, offline_plan
from tests.offline import appliances

HEAD = (
    '<Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" '
    'xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData">'
)
SEEDS = {"web": 11, "db": 12}


def system(key: str, name: str, number: int) -> str:
    return (
        f'<VirtualSystem ovf:id="{key}"><Name>{name}</Name><OperatingSystemSection ovf:id="96">'
        "<Description>Debian</Description></OperatingSystemSection><VirtualHardwareSection>"
        f"<Item><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType>"
        f"<rasd:VirtualQuantity>{number}</rasd:VirtualQuantity></Item>"
        "<Item><rasd:InstanceID>2</rasd:InstanceID><rasd:ResourceType>4</rasd:ResourceType>"
        "<rasd:AllocationUnits>GB</rasd:AllocationUnits><rasd:VirtualQuantity>1</rasd:VirtualQuantity></Item>"
        f"<Item><rasd:InstanceID>3</rasd:InstanceID><rasd:ResourceType>17</rasd:ResourceType>"
        f"<rasd:HostResource>ovf:/disk/d{number}</rasd:HostResource></Item>"
        "</VirtualHardwareSection></VirtualSystem>"
    )


def description(*systems: str) -> bytes:
    disks = "".join(f'<Disk ovf:diskId="d{number}" ovf:capacity="8388608" ovf:fileRef="f{number}"/>' for number in (1, 2))
    files = "".join(f'<File ovf:id="f{number}" ovf:href="{name}.qcow2"/>' for number, name in ((1, "web"), (2, "db")))
    return (
        f"{HEAD}<References>{files}</References><DiskSection>{disks}</DiskSection>"
        f'<VirtualSystemCollection ovf:id="shop">{"".join(systems)}</VirtualSystemCollection></Envelope>'
    ).encode()


SHOP = description(system("vm-1", "web", 1), system("vm-2", "db", 2))


def shop(folder: Path, how: str, text: bytes = SHOP) -> Path:
    raws = {name: appliances.raw_disk(seed=seed) for name, seed in SEEDS.items()}
    images = {f"{name}.qcow2": appliances.image(folder, name, "qcow2", raw).read_bytes() for name, raw in raws.items()}
    for name in raws:
        (folder / name).unlink()
    files = {"shop.ovf": text, **images}
    return appliances.archive(folder / "shop.ova", files) if how == "archive" else appliances.folder(folder / "shop", files)


@pytest.mark.parametrize("how", ["archive", "folder"])
@pytest.mark.parametrize(("vm", "name", "disk"), [("web", "web", "d1"), ("vm-2", "db", "d2")])
def test_one_is_chosen_by_name_or_id_with_its_own_disks(how: str, vm: str, name: str, disk: str, tmp_path: Path) -> None:
    path = shop(tmp_path, how)
    found = choosing(detect(path, tmp_path), vm).inspect(path, tmp_path)
    assert (found.name, found.cpu_count) == (name, int(disk[1:]))
    assert [one.key for one in found.disks] == [disk]
    assert "disk-unattached" not in str(found.concerns)


def test_none_chosen_names_them_and_says_how(tmp_path: Path) -> None:
    path = shop(tmp_path, "archive")
    with pytest.raises(UnsupportedFormat, match="holds 2 virtual machines: 'web', 'db'") as caught:
        detect(path, tmp_path).inspect(path, tmp_path)
    assert "source_ref.vm" in (caught.value.hint or "")


def test_one_that_is_not_there(tmp_path: Path) -> None:
    path = shop(tmp_path, "folder")
    with pytest.raises(VmNotFound, match="holds no virtual machines called 'mail'; it holds 'web', 'db'") as wrong:
        choosing(detect(path, tmp_path), "mail").inspect(path, tmp_path)
    assert wrong.value.hint == "Name one that it holds."  # before: list the source's VMs


def test_two_of_one_name_are_chosen_by_id(tmp_path: Path) -> None:
    path = shop(tmp_path, "folder", description(system("vm-1", "web", 1), system("vm-2", "web", 2)))
    with pytest.raises(VmNotFound, match="holds 2 virtual machines called 'web'"):
        choosing(detect(path, tmp_path), "web").inspect(path, tmp_path)
    assert choosing(detect(path, tmp_path), "vm-2").inspect(path, tmp_path).vm_id == "vm-2"


def test_a_kind_that_holds_one_alone(tmp_path: Path) -> None:
    path = appliances.image(tmp_path, "a.qcow2", "qcow2", appliances.raw_disk())
    with pytest.raises(BadRequest, match="a file of kind qcow2 holds one VM, so 'web' cannot be chosen"):
        choosing(detect(path, tmp_path), "web")


# ── through a job ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path, real_importers=True)
    yield made
    made.close()


def test_a_plan_chooses_and_only_that_vms_disk_is_copied(house: House) -> None:
    path = shop(house.imports, "archive")
    plan = offline_plan(path, kind="ova_archive")
    chosen = plan.model_validate(plan.model_dump() | {"source_ref": plan.source_ref.model_dump() | {"vm": "db"}})
    job = house.run(house.intake.submit(chosen).id)
    assert job.state == State.COMPLETED, job.last_error
    assert [disk.key for disk in job.disks] == ["d2"]
    assert house.volume(job, "d2").read_bytes() == appliances.raw_disk(seed=SEEDS["db"])
