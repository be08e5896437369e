"""OVF packages as folders: what lies beside what, and links."""

from pathlib import Path

import pytest

from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat
from synvirt.offline.ovf.folder import OvfFolder
from synvirt.offline.registry import detect
from tests.contracts.readers import read_all
from tests.offline import appliances

FOLDER = OvfFolder()


@pytest.fixture
def files() -> dict[str, bytes]:
    found = appliances.appliance("xenserver")
    del found["xenserver.mf"]
    return found


KEY = "Xen:c7dc3ff6-2a6b-42f9-8e2b-fd5b15aa05ab/58b2e9c9-6c62-4b8a-b1f5-6dbf62f9dd5a"


def source(path: Path, root: Path) -> str:
    spec = FOLDER.open_disk(path, root, KEY).reader
    assert isinstance(spec, ImageSpec)
    assert isinstance(spec.over, RawSpec)
    return spec.over.path


def test_an_image_may_name_files_under_the_root(files: dict[str, bytes], tmp_path: Path) -> None:
    path = appliances.folder(tmp_path / "web", files)
    spec = FOLDER.open_disk(path, tmp_path, KEY).reader
    assert isinstance(spec, ImageSpec)
    assert (spec.root, spec.name) == (str(tmp_path), "web/disk1.vhd")


def test_two_descriptions_in_one_folder_are_imported_by_their_own_paths(files: dict[str, bytes], tmp_path: Path) -> None:
    path = appliances.folder(tmp_path / "web", {**files, "other.ovf": appliances.description("cdrom_only")})
    with pytest.raises(MalformedArchive, match=r"web has 2 descriptions: other.ovf, xenserver.ovf"):
        FOLDER.inspect(path, tmp_path)
    assert FOLDER.inspect(path / "xenserver.ovf", tmp_path).name == "web01"
    assert FOLDER.inspect(path / "other.ovf", tmp_path).name == "live"


def test_a_manifest_of_the_other_description_is_not_this_ones(files: dict[str, bytes], tmp_path: Path) -> None:
    path = appliances.folder(tmp_path / "web", {**files, "a.mf": b"SHA1(gone)= " + b"0" * 40, "b.mf": b"", "a.ovf": b"<x/>"})
    assert FOLDER.inspect(path / "xenserver.ovf", tmp_path).name == "web01"


def test_a_disk_that_is_a_link_within_the_root(files: dict[str, bytes], tmp_path: Path) -> None:
    store = appliances.folder(tmp_path / "store", {"d.vhd": files.pop("disk1.vhd")})
    path = appliances.folder(tmp_path / "web", files)
    (path / "disk1.vhd").symlink_to("../store/d.vhd")
    assert source(path, tmp_path) == str(store / "d.vhd")


def test_a_disk_that_is_a_link_out_of_the_root(files: dict[str, bytes], tmp_path: Path) -> None:
    root = tmp_path / "imports"
    appliances.folder(tmp_path, {"secret.vhd": files.pop("disk1.vhd")})
    path = appliances.folder(root / "web", files)
    for target in ("../../secret.vhd", str(tmp_path / "secret.vhd")):
        (path / "disk1.vhd").symlink_to(target)
        with pytest.raises(HostPathRejected):
            FOLDER.open_disk(path, root, KEY)
        with pytest.raises(HostPathRejected):
            FOLDER.inspect(path, root)
        (path / "disk1.vhd").unlink()


def test_a_folder_that_is_a_link_out_of_the_root(files: dict[str, bytes], tmp_path: Path) -> None:
    outside = appliances.folder(tmp_path / "outside", files)
    root = tmp_path / "imports"
    root.mkdir()
    (root / "web").symlink_to(outside)
    for path in (root / "web", root / "web" / "xenserver.ovf"):
        with pytest.raises(HostPathRejected):
            detect(path, root)
        with pytest.raises(HostPathRejected):
            FOLDER.inspect(path, root)


def test_a_disk_beside_the_folder_under_the_root(files: dict[str, bytes], tmp_path: Path) -> None:
    appliances.folder(tmp_path / "disks", {"disk1.vhd": files.pop("disk1.vhd")})
    files["xenserver.ovf"] = files["xenserver.ovf"].replace(b'href="disk1.vhd"', b'href="../disks/disk1.vhd"')
    path = appliances.folder(tmp_path / "web", files)
    assert source(path, tmp_path) == str(tmp_path / "disks/disk1.vhd")


def test_a_disk_beside_the_folder_outside_the_root(files: dict[str, bytes], tmp_path: Path) -> None:
    appliances.folder(tmp_path, {"disk1.vhd": files.pop("disk1.vhd")})
    files["xenserver.ovf"] = files["xenserver.ovf"].replace(b'href="disk1.vhd"', b'href="../disk1.vhd"')
    path = appliances.folder(tmp_path / "web", files)
    with pytest.raises(HostPathRejected):
        FOLDER.inspect(path, path)


def test_the_disk_is_a_folder(files: dict[str, bytes], tmp_path: Path) -> None:
    del files["disk1.vhd"]
    path = appliances.folder(tmp_path / "web", files)
    (path / "disk1.vhd").mkdir()
    with pytest.raises(MalformedArchive, match=r"'disk1.vhd' is a folder in web, not a file"):
        FOLDER.inspect(path, tmp_path)


def test_a_folder_without_a_vm(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedFormat, match="empty is a folder without a VM"):
        detect(tmp_path / "empty", tmp_path)


def test_a_text_that_is_named_like_a_description(tmp_path: Path) -> None:
    (tmp_path / "a.ovf").write_bytes(b"what is this")
    with pytest.raises(UnsupportedFormat):
        detect(tmp_path / "a.ovf", tmp_path)


def test_the_disk_of_a_chain_reads_through_its_parents(files: dict[str, bytes], tmp_path: Path) -> None:
    """XenServer's export of a VM with snapshots, by hand: a differencing image whose parent lies beside it."""
    from synvirt import programs
    from synvirt.disks import open_reader

    base = appliances.raw_disk()
    path = appliances.folder(tmp_path / "web", files)
    appliances.image(path, "base.qcow2", "qcow2", base)
    (path / "disk1.vhd").unlink()
    argv = ["qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", str(path / "disk1.vhd")]
    programs.run(argv, timeout_s=30)
    reader = open_reader(FOLDER.open_disk(path, tmp_path, KEY).reader)
    assert read_all(reader) == base
    reader.close()
