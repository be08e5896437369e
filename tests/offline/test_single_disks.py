"""VHDX, qcow2 and VMDK by themselves: what is known, what is assumed, and chains of them."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt import programs
from synvirt.disks import open_reader
from synvirt.errors import HostPathRejected, UnsupportedFormat
from synvirt.model.machine import VmManifest
from synvirt.offline.registry import detect
from synvirt.offline.single.children import children_beside
from synvirt.sizes import GIB, MIB
from tests.contracts.readers import read_all
from tests.counted import bytes_read
from tests.disks.vhd import vhdx_images
from tests.disks.vmdk.vmdk_images import SE_SPARSE
from tests.offline import appliances
from tests.offline.test_partitions import BASIC, ESP, LINUX, RESERVED, disk


def inspected(path: Path) -> VmManifest:
    return detect(path, path.parent).inspect(path, path.parent)


def concern_ids(vm: VmManifest) -> set[str]:
    return {concern.id for concern in vm.concerns}


@pytest.mark.parametrize(("name", "image_format"), [("web server.qcow2", "qcow2"), ("web server.vhdx", "vhdx")])
def test_hardware_is_assumed_and_said_to_be(name: str, image_format: str, tmp_path: Path) -> None:
    path = appliances.image(tmp_path, name, image_format, appliances.raw_disk())
    vm = inspected(path)
    assert detect(path, tmp_path).kind == image_format
    assert (vm.name, vm.cpu_count, vm.memory_bytes, vm.firmware, vm.nics) == ("web server", 2, 2 * GIB, "bios", ())
    (only,) = vm.disks
    assert (only.key, only.label, only.bus, only.boot_order, only.format) == ("disk0", name, "virtio", 1, image_format)
    assert concern_ids(vm) == {"hardware-assumed", "guest-unknown"}


def test_a_linux_disk_that_boots_by_uefi_only(tmp_path: Path) -> None:
    raw = disk(tmp_path / "disk", "gpt", ESP, LINUX).read_bytes()
    vm = inspected(appliances.image(tmp_path, "a.qcow2", "qcow2", raw))
    assert (vm.firmware, vm.guest_os.family) == ("uefi", "linux")
    assert "uefi-state-lost" in concern_ids(vm)


def test_a_windows_disk_with_bitlocker(tmp_path: Path) -> None:
    path = disk(tmp_path / "disk", "gpt", ESP, RESERVED, BASIC)
    with path.open("r+b") as file:
        file.seek(17 << 20)
        file.write(b"\xeb\x58\x90-FVE-FS-")
    vm = inspected(appliances.image(tmp_path, "a.vhdx", "vhdx", path.read_bytes()))
    assert (vm.firmware, vm.guest_os.family) == ("uefi", "windows")
    assert "disk-bitlocker:disk0" in concern_ids(vm)


def test_a_file_without_a_suffix_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    assert detect(appliances.image(tmp_path, "download", "qcow2", appliances.raw_disk()), tmp_path).kind == "qcow2"


def test_a_qcow2_chain_under_the_root(tmp_path: Path) -> None:
    raw = appliances.raw_disk()
    appliances.image(tmp_path, "base.qcow2", "qcow2", raw)
    path = _overlay(tmp_path / "top.qcow2", "base.qcow2")
    reader = open_reader(detect(path, tmp_path).open_disk(path, tmp_path, "disk0").reader)
    assert read_all(reader) == raw
    reader.close()


def test_snapshots_inside_an_image_are_said_not_to_be_imported(tmp_path: Path) -> None:
    path = appliances.image(tmp_path, "a.qcow2", "qcow2", appliances.raw_disk())
    assert "disk-snapshots:disk0" not in concern_ids(inspected(path))
    for name in ("one", "two"):
        programs.run(["qemu-img", "snapshot", "-c", name, str(path)], timeout_s=60)
    (found,) = (one for one in inspected(path).concerns if one.id == "disk-snapshots:disk0")
    assert found.assessment == "The image of disk disk0 has 2 snapshots. Its current state alone is imported."


def test_a_disk_with_other_sectors_than_disks_have_here_is_said_to_be_unreadable_for_its_guest(tmp_path: Path) -> None:
    for sector_bytes in (512, 4096):
        path = tmp_path / f"{sector_bytes}.vhdx"
        vhdx_images.write(vhdx_images.Vhdx(appliances.DISK_BYTES, sector_bytes=sector_bytes), path)
        assert ("disk-sectors:disk0" in concern_ids(inspected(path))) == (sector_bytes == 4096)
        assert inspected(path).disks[0].sector_bytes == sector_bytes
    (found,) = (one for one in inspected(path).concerns if one.id == "disk-sectors:disk0")
    assert found.category == "Critical"
    assert found.assessment.startswith("Disk disk0 has sectors of 4096 bytes.")


@pytest.mark.parametrize("backing", ["/etc/hostname", "../secret.qcow2", "json:{}", "nbd://127.0.0.1/x"])
def test_a_backing_file_out_of_the_root(backing: str, tmp_path: Path) -> None:
    root = tmp_path / "imports"
    root.mkdir()
    appliances.image(tmp_path, "secret.qcow2", "qcow2", appliances.raw_disk())
    path = _overlay(root / "top.qcow2", backing)
    assert "disk-unreadable:disk0" in concern_ids(inspected(path))
    with pytest.raises(HostPathRejected):
        open_reader(detect(path, root).open_disk(path, root, "disk0").reader)


def _overlay(path: Path, backing: str) -> Path:
    argv = [
        "qemu-img",
        "create",
        "-u",
        "-q",
        "-f",
        "qcow2",
        "-b",
        backing,
        "-F",
        "qcow2",
        str(path),
        str(appliances.DISK_BYTES),
    ]
    programs.run(argv, timeout_s=30)
    return path


def _checkpoint(path: Path, parent: str) -> None:
    """As Hyper-V writes one: its locator has the parent's place on the machine that made it."""
    raw, under = path.with_suffix(".raw"), path.with_suffix(".under")
    under.write_bytes(bytes(appliances.DISK_BYTES))
    locator = (("relative_path", f".\\{parent}"), ("absolute_win32_path", f"C:\\VMs\\{parent}"))
    vhdx_images.write(vhdx_images.Vhdx(appliances.DISK_BYTES, locator=locator), path, raw=raw, parent_raw=under)


def _snapshot(path: Path, parent: str) -> None:
    lines = ["# Disk DescriptorFile", "version=1", "CID=1", "parentCID=2", f'parentFileNameHint="/vmfs/volumes/a/{parent}"']
    path.write_text("\n".join([*lines, 'createType="vmfsSparse"', 'RW 1 VMFSSPARSE "d.vmdk"', ""]))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("image_format", "child", "make"),
    [
        ("vhdx", "web_4D5E.avhdx", _checkpoint),
        ("vmdk", "web-000001.vmdk", _snapshot),
        ("qcow2", "web.snap1", _overlay),
    ],
)
def test_who_imports_a_parent_is_told_of_its_children(
    image_format: str, child: str, make: Callable[[Path, str], object], tmp_path: Path
) -> None:
    path = appliances.image(tmp_path, f"web.{image_format}", image_format, appliances.raw_disk())
    make(tmp_path / f"other-{child}", f"another.{image_format}")
    os.mkfifo(tmp_path / "web.fifo")
    for length in (0, 8, 600, 70_000):
        (tmp_path / f"web.{length}").write_bytes(path.read_bytes()[:length])
    assert "disk-newer-files:disk0" not in concern_ids(inspected(path))
    make(tmp_path / child, path.name)
    (found,) = (one for one in inspected(path).concerns if one.id == "disk-newer-files:disk0")
    assert found.category == "Warning"
    assert f" {child}. " in found.assessment
    assert children_beside(tmp_path / child, tmp_path) == []


@pytest.mark.timeout(60)
def test_a_folder_of_many_files_is_looked_at_within_bounds(tmp_path: Path) -> None:
    path = appliances.image(tmp_path, "web.qcow2", "qcow2", appliances.raw_disk())
    for number in range(300):
        (tmp_path / f"{number}.qcow2").write_bytes(path.read_bytes()[: 64 << 10])
    _overlay(tmp_path / "web.snap1", path.name)
    with bytes_read() as count:
        assert "disk-newer-files:disk0" in concern_ids(inspected(path))
    assert count.bytes < 4 << 20


@pytest.mark.parametrize(
    ("image_format", "what"),
    [
        ("vpc", "a VHD image without a machine"),
        ("vdi", "a VDI image without a machine"),
        ("parallels", "a Parallels image without a machine"),
        ("qed", "a QED image without a machine"),
    ],
)
def test_formats_that_are_no_kind_say_what_to_do(image_format: str, what: str, tmp_path: Path) -> None:
    path = appliances.image(tmp_path, "disk", image_format, appliances.raw_disk())
    with pytest.raises(UnsupportedFormat, match=what) as caught:
        detect(path, tmp_path)
    assert "qemu-img convert" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("name", "content", "what", "hint"),
    [
        ("a.dmg", b"x" * 4096 + b"koly" + bytes(508), "a dmg image without a machine", "qemu-img convert"),
        ("fixed.vhd", b"x" * 4096 + b"conectix" + bytes(504), "a VHD image without a machine", "qemu-img convert"),
        ("cut.dmg", b"x" * 4096, "called a dmg image, and its content is not", "cut off"),
        ("cut.vhd", b"x" * 4096, "called a VHD image, and its content is not", "cut off"),
        ("web-flat.vmdk", b"x" * 4096, "of an unknown kind", "-f raw"),
        ("web-f001.vmdk", b"x" * 4096, "of an unknown kind", "-f raw"),
        ("a", b"x", "of an unknown kind", "-f raw"),
    ],
)
def test_what_is_known_by_its_end_or_its_name_alone(name: str, content: bytes, what: str, hint: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UnsupportedFormat, match=what) as caught:
        detect(tmp_path / name, tmp_path)
    assert hint in (caught.value.hint or "")


def test_an_extent_of_sesparse_by_itself_is_refused_with_what_to_choose(tmp_path: Path) -> None:
    path = tmp_path / "web-000001-sesparse.vmdk"
    path.write_bytes(SE_SPARSE.file())
    (disk,) = [each for each in inspected(path).concerns if each.id == "disk-unreadable:disk0"]
    assert disk.category == "Critical"
    assert "one extent of a disk" in disk.assessment


def test_a_raw_disk_is_no_kind(tmp_path: Path) -> None:
    (tmp_path / "disk.img").write_bytes(appliances.raw_disk())
    with pytest.raises(UnsupportedFormat, match="of an unknown kind"):
        detect(tmp_path / "disk.img", tmp_path)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.qcow2", ["-f", "qcow2"]),
        ("a.vhdx", ["-f", "vhdx"]),
        ("a.vmdk", ["-f", "vmdk"]),
        ("flat.vmdk", ["-f", "vmdk", "-o", "subformat=monolithicFlat"]),
    ],
)
def test_a_disk_of_a_tebibyte_is_looked_into_and_not_read(name: str, options: list[str], tmp_path: Path) -> None:
    programs.run(["qemu-img", "create", "-q", *options, str(tmp_path / name), "1T"], timeout_s=60)
    inspected(tmp_path / name)  # modules are imported
    with bytes_read() as count:
        assert inspected(tmp_path / name).disks[0].capacity_bytes == 1 << 40
    assert count.bytes < 4 << 20


@pytest.mark.parametrize(
    ("name", "image_format", "options", "says"),
    [
        ("a.qcow2", "qcow2", [], True),
        ("a.qcow2", "qcow2", ["preallocation=full"], False),
        ("a.vhdx", "vhdx", [], True),
        ("a.vmdk", "vmdk", [], True),
        ("a.vmdk", "vmdk", ["subformat=streamOptimized"], True),
        ("a.vmdk", "vmdk", ["subformat=monolithicFlat"], True),
    ],
)
def test_what_a_disk_holds_is_said_by_the_tables_of_its_image(
    name: str, image_format: str, options: list[str], says: bool, tmp_path: Path
) -> None:
    """At least all bytes but zeros, less than the whole; nothing, if the image calls its zeros data too."""
    raw = appliances.raw_disk()
    used = inspected(appliances.image(tmp_path, name, image_format, raw, *options)).disks[0].used_bytes
    assert (used is not None) == says
    assert used is None or len(raw) - raw.count(0) <= used < len(raw)


def test_a_compressed_disk_without_zeros_holds_all_of_it(tmp_path: Path) -> None:
    path = appliances.image(tmp_path, "a.vmdk", "vmdk", b"\1" * MIB, "subformat=streamOptimized")
    assert inspected(path).disks[0].used_bytes == MIB
