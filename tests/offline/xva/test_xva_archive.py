"""XVA archives as XenServer and XCP-ng export them."""

import tarfile
from pathlib import Path
from random import Random

import pytest

from synvirt import xml_document
from synvirt.disks import open_reader
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.offline.registry import detect
from synvirt.offline.xva import ova_xml
from synvirt.sizes import GIB
from tests.contracts.readers import read_all
from tests.counted import bytes_read
from tests.disks.xva import xva_archives
from tests.offline import appliances, test_partitions
from tests.offline.xva import ova_xml_text
from tests.offline.xva.ova_xml_text import Value

MIB = 1 << 20
SIZES = {"Ref:4": 10 * GIB, "Ref:5": GIB}


def parsed_text(data: bytes, name: str) -> VmManifest:
    return ova_xml.parse(xml_document.parse(data, name), name)


def parsed(**changes: Value) -> VmManifest:
    return parsed_text(ova_xml_text.whole(SIZES, **changes), "ova.xml")


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


def test_a_vm_of_xcp_ng() -> None:
    vm = parsed()
    assert (vm.name, vm.uuid, vm.power_state) == ("web 1", "6a3f2c51-3f9e-8d6b-1f0c-0f4a2c9b7e11", "off")
    assert (vm.cpu_count, vm.cores_per_socket, vm.memory_bytes, vm.firmware) == (4, 2, 4 * GIB, "bios")
    assert (vm.guest_os.family, vm.guest_os.name) == ("linux", "Debian Bookworm 12")
    first, second = vm.disks
    assert (first.key, first.label, first.capacity_bytes, first.boot_order) == ("Ref:4", "system", 10 * GIB, 1)
    assert (first.controller, first.unit, first.used_bytes) == ("ide0", 0, 1234567)
    assert (second.key, second.label, second.controller, second.unit, second.boot_order) == ("Ref:5", "data", "ide0", 1, None)
    assert [(nic.mac, nic.network) for nic in vm.nics] == [
        ("26:5a:1c:0f:33:91", "Pool-wide network associated with eth0"),
        ("26:5a:1c:0f:33:92", "Pool-wide network associated with eth0"),
    ]
    assert concern_ids(vm) == set()


def test_uefi_secure_boot_and_tpm() -> None:
    vm = parsed(HVM_boot_params={"firmware": "uefi"}, platform={"secureboot": "true", "vtpm": "true"}, VTPMs=["Ref:60"])
    assert (vm.firmware, vm.secure_boot, vm.tpm) == ("uefi", True, True)
    assert {"uefi-state-lost", "secure-boot", "tpm"} <= concern_ids(vm)


@pytest.mark.parametrize(
    "changes",
    [
        {"other_config": {"base_template_name": "Windows Server 2022 (64-bit)"}},
        {"other_config": {}, "platform": {"viridian": "true"}},
        {"other_config": {}, "platform": {"device_id": "0002"}},
    ],
)
def test_windows_by_template_or_platform(changes: dict[str, Value]) -> None:
    assert parsed(**changes).guest_os.family == "windows"


def test_a_paravirtualised_guest_is_a_critical_concern() -> None:
    vm = parsed(PV_bootloader="pygrub", HVM_boot_policy="", HVM_boot_params={})
    assert "paravirtualised" in {concern.id for concern in vm.concerns if concern.category == "Critical"}


def test_a_suspended_vm() -> None:
    vm = parsed(power_state="Suspended", suspend_VDI="Ref:9")
    assert vm.power_state == "suspended"
    assert "suspended" in concern_ids(vm)


def test_snapshots_travel_beside_their_vm() -> None:
    text = ova_xml_text.ova_xml(
        ("VM", "Ref:0", ova_xml_text.vm(VBDs=[])),
        ("VM", "Ref:1", ova_xml_text.vm(name_label="before the update", is_a_snapshot=True, is_a_template=True)),
    )
    vm = parsed_text(text, "ova.xml")
    assert (vm.name, [snapshot.name for snapshot in vm.snapshots]) == ("web 1", ["before the update"])
    assert "snapshots-present" in concern_ids(vm)


def test_an_exported_snapshot_is_the_vm() -> None:
    vm = parsed_text(ova_xml_text.ova_xml(("VM", "Ref:0", ova_xml_text.vm(is_a_snapshot=True, VBDs=[]))), "ova.xml")
    assert vm.name == "web 1"
    assert "no-disks" in concern_ids(vm)


def test_two_vms_are_named() -> None:
    both = [("VM", f"Ref:{number}", ova_xml_text.vm(name_label=f"vm{number}")) for number in range(2)]
    with pytest.raises(UnsupportedFormat, match="holds 2 virtual machines: 'vm0', 'vm1'"):
        parsed_text(ova_xml_text.ova_xml(*both), "ova.xml")


def test_more_than_four_disks_are_beyond_ide() -> None:
    disks = [f"Ref:{100 + number}" for number in range(6)]
    vbds = [("VBD", f"Ref:{200 + number}", ova_xml_text.vbd(disk, str(number))) for number, disk in enumerate(disks)]
    vdis = [("VDI", disk, ova_xml_text.vdi(GIB, "disk")) for disk in disks]
    text = ova_xml_text.ova_xml(("VM", "Ref:0", ova_xml_text.vm(VBDs=[key for _, key, _ in vbds])), *vbds, *vdis)
    places = [(disk.controller, disk.unit) for disk in parsed_text(text, "ova.xml").disks]
    assert places == [("ide0", 0), ("ide0", 1), ("ide1", 0), ("ide1", 1), ("scsi0", 0), ("scsi0", 1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"<value>x</value>", "has no list of objects"),
        (b"<value><struct/></value>", "has no list of objects"),
        (ova_xml_text.ova_xml(), "describes no VM"),
        (ova_xml_text.xml_rpc({"objects": ["x"]}).encode(), "an object without class"),
        (b"<value><struct><member><name>a</name></member></struct></value>", "without name or value"),
        (b"<value>" * 100 + b"</value>" * 100, "more than 40 deep"),
        (b"<!DOCTYPE x><value/>", "document type definition"),
        (b"<value>", "not well-formed"),
    ],
)
def test_damage_is_named(text: bytes, says: str) -> None:
    with pytest.raises(MalformedArchive, match=says):
        parsed_text(text, "ova.xml")


def test_an_archive_packed_again_with_ova_xml_behind_a_disk(tmp_path: Path) -> None:
    path = tmp_path / "a.xva"
    with tarfile.open(path, "w") as tar:
        for name, data in xva_archives.pieces("Ref:4", b"x" * MIB):
            xva_archives._add(tar, name, data)
        xva_archives._add(tar, "ova.xml", ova_xml_text.whole(SIZES))
    assert detect(path, tmp_path).inspect(path, tmp_path).name == "web 1"


def test_a_truncated_archive_is_still_an_xva_by_its_name(tmp_path: Path) -> None:
    path = xva_archives.archive(tmp_path / "a.xva", ova_xml_text.whole(SIZES), {})
    path.write_bytes(path.read_bytes()[:1500])
    with pytest.raises(MalformedArchive, match="cut short"):
        detect(path, tmp_path).inspect(path, tmp_path)


def test_an_ova_is_no_xva_and_the_other_way_round(tmp_path: Path) -> None:
    xva = xva_archives.archive(tmp_path / "a.ova", ova_xml_text.whole(SIZES), {})
    ova = appliances.archive(tmp_path / "a.xva", {"a.ovf": appliances.description("cdrom_only")})
    assert detect(xva, tmp_path).kind == "xva_archive"
    assert detect(ova, tmp_path).kind == "ova_archive"


@pytest.mark.parametrize("digest", ["xxhash", "checksum"])
def test_a_piece_that_is_not_what_its_digest_says_fails_the_copy(digest: str, tmp_path: Path) -> None:
    """Both generations: XenServer's SHA-1 and XCP-ng's XXH64."""
    disk = Random(1).randbytes(3 * MIB)
    text = ova_xml_text.one_disk(len(disk), memory_bytes=GIB)
    path = xva_archives.archive(tmp_path / "a.xva", text, {"Ref:4": disk}, digest=digest)
    importer = detect(path, tmp_path)
    for flipped in (False, True):
        reader = open_reader(importer.open_disk(path, tmp_path, "Ref:4").reader)
        if not flipped:
            assert read_all(reader) == disk
            whole = path.read_bytes()
            at = whole.index(disk[2 * MIB : 2 * MIB + 4096])
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        else:
            with pytest.raises(MalformedArchive, match="at offset 2097152 do not have their digest"):
                read_all(reader)
        reader.close()


# ── what the disks tell ──────────────────────────────────────────────────────────────────────────────────────────────


UNKNOWN: dict[str, Value] = {"other_config": {}, "platform": {}}


@pytest.mark.parametrize(
    ("types", "family"),
    [((test_partitions.ESP, test_partitions.RESERVED, test_partitions.BASIC), "windows"), ((test_partitions.LINUX,), "linux")],
)
def test_a_guest_that_xapi_does_not_name_is_reported_by_its_partitions(
    types: tuple[str, ...], family: str, tmp_path: Path
) -> None:
    raw = test_partitions.disk(tmp_path / "disk", "gpt", *types).read_bytes()
    disks = {"Ref:4": raw, "Ref:5": bytes(2 * MIB)}
    text = ova_xml_text.whole({key: len(disk) for key, disk in disks.items()}, **UNKNOWN)
    path = xva_archives.archive(tmp_path / "a.xva", text, disks)
    vm = detect(path, tmp_path).inspect(path, tmp_path)
    assert vm.guest_os.family == family
    assert "guest-unknown" not in concern_ids(vm)


def test_bitlocker_in_an_xva(tmp_path: Path) -> None:
    file = test_partitions.disk(tmp_path / "disk", "gpt", test_partitions.ESP, test_partitions.BASIC)
    with file.open("r+b") as disk:
        disk.seek(9 * MIB)
        disk.write(b"\xeb\x58\x90-FVE-FS-")
    raw = file.read_bytes()
    disks = {"Ref:4": raw, "Ref:5": bytes(2 * MIB)}
    path = xva_archives.archive(tmp_path / "a.xva", ova_xml_text.whole({key: len(disks[key]) for key in disks}), disks)
    assert "disk-bitlocker:Ref:4" in concern_ids(detect(path, tmp_path).inspect(path, tmp_path))


def test_a_disk_behind_gigabytes_of_others_is_not_looked_for(tmp_path: Path) -> None:
    """Each piece is a header to walk over: a look at the last disk of a large archive would take minutes."""
    disks = {"Ref:4": appliances.raw_disk(2 * MIB), "Ref:5": appliances.raw_disk(2 * MIB)}
    path = tmp_path / "a.xva"
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        xva_archives._add(archive, "ova.xml", ova_xml_text.whole({key: len(disks[key]) for key in disks}, **UNKNOWN))
        for number in range(1500):
            xva_archives._add(archive, f"Ref:4/{number:08d}", b"x" if number == 0 else b"")
        for name, data in xva_archives.pieces("Ref:5", disks["Ref:5"]):
            xva_archives._add(archive, name, data)
    vm = detect(path, tmp_path).inspect(path, tmp_path)
    assert [disk.capacity_bytes for disk in vm.disks] == [2 * MIB, 2 * MIB]


def test_an_archive_of_many_pieces_is_looked_into_and_not_read(tmp_path: Path) -> None:
    """20 GiB of a disk: 20,000 headers and as many mebibytes, as holes in a file."""
    path = tmp_path / "a.xva"
    text = ova_xml_text.whole({"Ref:4": 20_000 * MIB, "Ref:5": MIB})
    description = tarfile.TarInfo("ova.xml")
    description.size = len(text)
    with path.open("wb") as file:
        file.write(description.tobuf() + text + bytes(-len(text) % 512))
        for number in range(20_000):
            piece = tarfile.TarInfo(f"Ref:4/{number:08d}")
            piece.size = MIB
            file.write(piece.tobuf(tarfile.USTAR_FORMAT))
            file.seek(MIB, 1)
        file.truncate(file.tell() + 1024)
    detect(path, tmp_path).inspect(path, tmp_path)
    with bytes_read() as count:
        assert detect(path, tmp_path).inspect(path, tmp_path).disks[0].capacity_bytes == 20_000 * MIB
    assert count.bytes < 4 << 20
