"""What a machine is made of, at its source and in the domain that is made of it: nothing is lost between them."""

import re
from uuid import UUID

import pytest

from synvirt.hypervisor import Volume
from synvirt.hypervisor.domain_xml import build
from synvirt.hypervisor.facts import of_domain, of_source
from synvirt.hypervisor.machine import Machine
from synvirt.model.machine import Disk, Nic, VmManifest
from synvirt.model.plan import Target
from synvirt.proof.sameness import compared
from synvirt.sizes import GIB
from tests.fakes.hypervisor import HOST

ID = UUID(int=7)


def machine(**changes: object) -> Machine:
    manifest = VmManifest(
        vm_id="web",
        name="web",
        cpu_count=2,
        memory_bytes=2 * GIB,
        firmware="uefi",
        disks=(
            Disk(key="data", label="data", capacity_bytes=5 << 20, boot_order=2),
            Disk(key="system", label="system", capacity_bytes=9 << 20, boot_order=1),
        ),
        nics=(Nic(key="1", mac="52:54:00:AA:00:01"), Nic(key="2", mac="52:54:00:aa:00:02")),
    ).model_copy(update=changes)
    return Machine(id=ID, manifest=manifest, target=Target())


def xml(of: Machine) -> str:
    volumes = [Volume(disk.key, f"/volumes/{disk.key}.raw", "file") for disk in of.manifest.disks if disk.key not in of.skipped]
    return build(of, volumes, HOST).xml


SIZES = {"sda": 5 << 20, "sdb": 9 << 20}


def test_the_domain_of_a_machine_is_that_machine() -> None:
    for one in (machine(), machine(firmware="bios"), machine(secure_boot=True)):
        there, here = of_source(one), of_domain(xml(one), one, SIZES)
        assert there == here
        assert there["boot order"] == "system, data"


@pytest.mark.parametrize(
    ("lost", "item"),
    [
        (r"<disk.*?</disk>", "disk data"),
        (r"<interface.*?</interface>", "network card 1"),
        (r"<loader.*?</loader>", "firmware"),
        (r'<boot order="1" */>', "boot order"),
        (r"<vcpu>.*?</vcpu>", "processors"),
        (r"<memory.*?</memory>", "memory"),
    ],
)
def test_what_is_lost_of_it_is_wrong(lost: str, item: str) -> None:
    one = machine()
    text, count = re.subn(lost, "", xml(one), count=1, flags=re.DOTALL)
    assert count == 1
    rows = compared({}, {}, (), (of_source(one), of_domain(text, one, SIZES)))
    assert item in [row.item for row in rows if row.grade == "wrong"]


def test_a_disk_that_is_cut_short_is_wrong_and_one_that_is_rounded_up_is_not() -> None:
    one = machine()
    rows = compared({}, {}, (), (of_source(one), of_domain(xml(one), one, {"sda": (5 << 20) - 512, "sdb": (9 << 20) + 512})))
    assert {row.item: row.grade for row in rows if row.grade != "same"} == {"disk data": "wrong", "disk system": "expected"}


def test_memory_that_is_no_whole_mib_is_an_expected_difference() -> None:
    """libvirt rounds it up, as QEMU takes whole MiB: nothing of the machine is wrong by that."""
    one = machine(memory_bytes=1_000_000 << 10)
    found = build(one, [Volume(disk.key, f"/{disk.key}", "file") for disk in one.manifest.disks], HOST)
    rows = compared({}, {}, found.differences, (of_source(one), of_domain(found.xml, one, SIZES)))
    assert f">{977 << 20}<" in found.xml
    assert [(row.source, row.clone, row.grade) for row in rows if row.item == "memory"] == [
        ("976.5625 MiB", "977 MiB", "expected")
    ]
