"""XVA version 1: folders, and archives of them."""

from pathlib import Path

import pytest

from synvirt.disks import open_reader
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.offline.registry import detect
from synvirt.sizes import MIB
from tests.contracts.readers import read_all
from tests.offline import appliances
from tests.offline.xva import geneva_exports, ova_xml_text


def disks() -> dict[str, bytes]:
    return {"sda": appliances.raw_disk(), "sdb": appliances.raw_disk(4 * MIB, seed=3)}


def exported(path: Path, how: str, **described: bool | str) -> Path:
    files = geneva_exports.files(disks(), **described)
    if how == "archive":
        return appliances.archive(path / "old.xva", files)
    folder = appliances.folder(path / "old", files)
    return folder if how == "folder" else folder / "ova.xml"


def inspected(path: Path, root: Path) -> VmManifest:
    importer = detect(path, root)
    assert importer.kind == "xva_archive"
    return importer.inspect(path, root)


@pytest.mark.parametrize("how", ["folder", "ova.xml", "archive"])
def test_a_vm_of_xenserver_3(how: str, tmp_path: Path) -> None:
    path = exported(tmp_path, how)
    vm = inspected(path, tmp_path)
    assert (vm.name, vm.vm_id, vm.cpu_count, vm.memory_bytes) == ("Debian Sarge", "vm", 2, 256 * MIB)
    assert (vm.guest_os.family, vm.firmware) == ("linux", "bios")
    assert [(disk.key, disk.label, disk.capacity_bytes, disk.controller, disk.unit, disk.boot_order) for disk in vm.disks] == [
        ("vdi_sda", "sda", 8 * MIB, "ide0", 0, 1),
        ("vdi_sdb", "sdb", 4 * MIB, "ide0", 1, None),
    ]
    assert {concern.id for concern in vm.concerns} == {"disk-compressed:vdi_sda", "disk-compressed:vdi_sdb"}
    for device, disk in disks().items():
        reader = open_reader(detect(path, tmp_path).open_disk(path, tmp_path, f"vdi_{device}").reader)
        assert read_all(reader) == disk
        reader.close()


def test_a_paravirtualised_guest_is_a_critical_concern(tmp_path: Path) -> None:
    vm = inspected(exported(tmp_path, "folder", hvm=False), tmp_path)
    assert [concern.id for concern in vm.concerns if concern.category == "Critical"] == ["paravirtualised"]


@pytest.mark.parametrize(
    ("old", "new", "error", "says"),
    [
        (
            "</vm>",
            '</vm><vm name="b"><label>b</label></vm>',
            UnsupportedFormat,
            "holds 2 virtual machines: 'Debian Sarge', 'b'",
        ),
        ("dir-gzipped-chunks", "raw", UnsupportedFormat, "of type 'raw' in 'file://sda'; dir-gzipped-chunks is read"),
        ("file://sda", "nfs://x/sda", UnsupportedFormat, "'nfs://x/sda'"),
        (
            'vdi="vdi_sdb"',
            'vdi="vdi_sda"',
            MalformedArchive,
            "its disk 1 is the image 'vdi_sda', which it has not, or a second",
        ),
        ('vdi="vdi_sdb"', 'vdi="gone"', MalformedArchive, "the image 'gone'"),
        ('size="8388608"', 'size="-1"', UnsupportedFormat, "vdi_sda"),
        ("<appliance", "<x/><appliance", MalformedArchive, "not well-formed"),
    ],
)
def test_what_is_wrong_is_said(old: str, new: str, error: type[Exception], says: str, tmp_path: Path) -> None:
    path = exported(tmp_path, "folder")
    text = (path / "ova.xml").read_text()
    assert old in text
    (path / "ova.xml").write_text(text.replace(old, new))
    with pytest.raises(error, match=says):
        inspected(path, tmp_path)


def test_missing_chunks(tmp_path: Path) -> None:
    path = exported(tmp_path, "folder")
    importer = detect(path, tmp_path)
    (path / "sda/chunk-000000000.gz").unlink()
    with pytest.raises(MalformedArchive, match=r"disk vdi_sda has no file sda/chunk-000000000.gz"):
        importer.open_disk(path, tmp_path, "vdi_sda")


@pytest.mark.parametrize("missing", [1, 2])
@pytest.mark.parametrize("how", ["folder", "archive"])
def test_a_disk_without_its_last_chunks_is_refused(how: str, missing: int, tmp_path: Path) -> None:
    """Each chunk is a whole gzip file, and a disk of the first ones would be one whose end is zeros."""
    files = geneva_exports.files(disks())
    del files[f"sda/chunk-{missing:09d}.gz"]
    path = appliances.archive(tmp_path / "old.xva", files) if how == "archive" else appliances.folder(tmp_path / "old", files)
    with pytest.raises(MalformedArchive, match=f"sda inflates to {missing * geneva_exports.CHUNK_BYTES} bytes of {8 * MIB}"):
        open_reader(detect(path, tmp_path).open_disk(path, tmp_path, "vdi_sda").reader)


def test_a_folder_that_leads_out(tmp_path: Path) -> None:
    root = tmp_path / "imports"
    path = exported(root, "folder")
    for name in sorted((path / "sda").iterdir()):
        name.rename(tmp_path / name.name)
    (path / "sda").rmdir()
    (path / "sda").symlink_to("../..")
    with pytest.raises(HostPathRejected):
        detect(path, root).open_disk(path, root, "vdi_sda")


def test_an_unpacked_archive_of_version_2_says_what_to_do(tmp_path: Path) -> None:
    text = ova_xml_text.whole({"Ref:4": MIB, "Ref:5": MIB})
    path = appliances.folder(tmp_path / "new", {"ova.xml": text})
    with pytest.raises(UnsupportedFormat, match="is of a newer version"):
        inspected(path, tmp_path)
