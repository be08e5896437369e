"""Appliances as archives: packed by exporters and by people, with and without digests, and damaged."""

import bz2
import gzip
import lzma
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from synvirt import programs
from synvirt.disks.specs import ImageSpec
from synvirt.errors import MalformedArchive, UnsupportedFormat
from synvirt.offline.registry import detect
from synvirt.sizes import MIB
from tests.counted import bytes_read
from tests.needs import need
from tests.offline import appliances
from tests.offline.ova_archive.reading import concern_ids, inspected, member_bytes, opened


@pytest.mark.parametrize("exporter", sorted(appliances.DISKS))
def test_every_exporters_appliance_is_read_in_place(exporter: str, tmp_path: Path) -> None:
    files = appliances.appliance(exporter)
    path = appliances.archive(tmp_path / "a.ova", files)
    vm = inspected(path)
    assert not {concern.id for concern in vm.concerns if concern.category == "Critical"}
    for disk, name in zip(vm.disks, appliances.DISKS[exporter], strict=True):
        found = opened(path, disk.key)
        assert isinstance(found.reader, ImageSpec)
        assert (found.reader.format, found.reader.name, found.reader.root) == (disk.format, name, None)
        assert disk.capacity_bytes == (16 * MIB if name == "disk2.vmdk" else 8 * MIB)
        assert member_bytes(path, found) == files[name]
        (checksum,) = found.checksums
        assert (checksum.algorithm, checksum.name, checksum.length) == ("sha256", name, len(files[name]))


# ── packing ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("tar_format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("order", ["as exported", "backwards"])
def test_members_in_any_order_and_dialect(files: dict[str, bytes], order: str, tar_format: int, tmp_path: Path) -> None:
    names = list(files) if order == "as exported" else list(reversed(files))
    path = appliances.archive(tmp_path / "a.ova", {name: files[name] for name in names}, tar_format)
    assert inspected(path).name == "Debian 12"
    assert member_bytes(path, opened(path)) == files["disk1.vmdk"]


def test_packed_with_dot_slash_by_a_person(files: dict[str, bytes], tmp_path: Path) -> None:
    need("tar", "tar")
    folder = appliances.folder(tmp_path / "in", files)
    path = tmp_path / "a.ova"
    programs.run(["tar", "-cf", str(path), "-C", str(folder), "."], timeout_s=30)
    assert member_bytes(path, opened(path)) == files["disk1.vmdk"]
    assert opened(path).checksums


def test_packed_in_a_folder(files: dict[str, bytes], tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "a.ova", {f"export/vm/{name}": data for name, data in files.items()})
    assert inspected(path).name == "Debian 12"
    assert member_bytes(path, opened(path)) == files["disk1.vmdk"]
    assert opened(path).checksums[0].name == "export/vm/disk1.vmdk"


def test_disks_in_a_subfolder_of_the_description(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(b'href="disk1.vmdk"', b'href="disks/disk1.vmdk"')
    files["disks/disk1.vmdk"] = files.pop("disk1.vmdk")
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert member_bytes(path, opened(path)) == files["disks/disk1.vmdk"]


def test_url_encoded_names(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(b'href="disk1.vmdk"', b'href="my%20disk%231.vmdk"')
    files["my disk#1.vmdk"] = files.pop("disk1.vmdk")
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert member_bytes(path, opened(path)) == files["my disk#1.vmdk"]


def test_a_name_that_only_looks_url_encoded(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(b'href="disk1.vmdk"', b'href="disk%201.vmdk"')
    files["disk%201.vmdk"] = files.pop("disk1.vmdk")
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert member_bytes(path, opened(path)) == files["disk%201.vmdk"]


@pytest.mark.parametrize("there", ["DISK1.vmdk", "Disk1.VMDK"])
def test_capitals_of_a_name_make_no_difference(files: dict[str, bytes], there: str, tmp_path: Path) -> None:
    """Packed on Windows. The manifest's digest of the description and of the disk are compared all the same."""
    files[there], files["VirtualBox.ovf"] = files.pop("disk1.vmdk"), files.pop("virtualbox.ovf")
    path = appliances.archive(tmp_path / "a.ova", files)
    assert not concern_ids(inspected(path)) & {"checksums-missing", "checksums-incomplete"}
    assert member_bytes(path, opened(path)) == files[there]
    assert [check.name for check in opened(path).checksums] == [there]
    files["VirtualBox.ovf"] += b"<!-- edited -->"
    with pytest.raises(MalformedArchive, match=r"VirtualBox.ovf does not have the SHA256 digest"):
        inspected(appliances.archive(tmp_path / "a.ova", files))


def test_a_name_that_may_be_one_of_two_files_is_none_of_them(files: dict[str, bytes], tmp_path: Path) -> None:
    files["DISK1.vmdk"] = files["Disk1.vmdk"] = files.pop("disk1.vmdk")
    del files["virtualbox.mf"]
    with pytest.raises(MalformedArchive, match=r"a.ova has no file 'disk1.vmdk'"):
        inspected(appliances.archive(tmp_path / "a.ova", files))


def test_macos_writes_accents_as_letters_of_their_own(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(b'href="disk1.vmdk"', 'href="Café.vmdk"'.encode())
    files["Cafe\u0301.vmdk"] = files.pop("disk1.vmdk")
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert member_bytes(path, opened(path)) == files["Cafe\u0301.vmdk"]


def test_macos_puts_a_shadow_beside_each_file(files: dict[str, bytes], tmp_path: Path) -> None:
    shadows = {f"._{name}": b"\0\5\x16\7Mac OS X" for name in files}
    path = appliances.archive(tmp_path / "a.ova", {**shadows, **files})
    assert inspected(path).name == "Debian 12"


def test_a_capital_suffix(files: dict[str, bytes], tmp_path: Path) -> None:
    files["VM.OVF"] = files.pop("virtualbox.ovf")
    del files["virtualbox.mf"]
    assert inspected(appliances.archive(tmp_path / "VM.OVA", files)).name == "Debian 12"


def test_any_suffix_or_none(files: dict[str, bytes], tmp_path: Path) -> None:
    assert inspected(appliances.archive(tmp_path / "upload", files)).name == "Debian 12"


def test_two_descriptions(files: dict[str, bytes], tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "a.ova", {**files, "other.ovf": files["virtualbox.ovf"]})
    with pytest.raises(MalformedArchive, match=r"a.ova has 2 descriptions: other.ovf, virtualbox.ovf"):
        inspected(path)


def test_a_description_below_another_is_not_the_one(files: dict[str, bytes], tmp_path: Path) -> None:
    assert inspected(appliances.archive(tmp_path / "a.ova", {"old/a.ovf": b"<x/>", **files})).name == "Debian 12"


def test_the_disk_is_a_link_in_the_archive(files: dict[str, bytes], tmp_path: Path) -> None:
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", {name: data for name, data in files.items() if name != "disk1.vmdk"})
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("disk1.vmdk")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(MalformedArchive, match=r"'disk1.vmdk' is a link or device in a.ova, not a file"):
        inspected(path)


@pytest.mark.parametrize("href", ["../../etc/passwd", "/etc/passwd", "a/../../b", "..%2f..%2fetc%2fpasswd"])
def test_a_description_that_points_out_of_the_archive(files: dict[str, bytes], href: str, tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(b'href="disk1.vmdk"', f'href="{href}"'.encode())
    del files["virtualbox.mf"]
    with pytest.raises(MalformedArchive, match="has no file"):
        inspected(appliances.archive(tmp_path / "a.ova", files))


def test_a_disk_on_a_web_server_is_a_critical_concern(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(b'href="disk1.vmdk"', b'href="https://example.org/disk1.vmdk"')
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert "disk-unreadable:vmdisk1" in concern_ids(inspected(path))
    with pytest.raises(UnsupportedFormat, match="which is not in the package"):
        opened(path)


# ── digests ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("algorithm", ["SHA1", "SHA256", "SHA512"])
@pytest.mark.parametrize("line", ["{algorithm}({name})= {digest}\n", "{algorithm} ({name}) = {digest}\r\n"])
def test_digests_become_checks_of_the_copy(files: dict[str, bytes], line: str, algorithm: str, tmp_path: Path) -> None:
    del files["virtualbox.mf"]
    files["virtualbox.mf"] = appliances.manifest(files, algorithm, line)
    path = appliances.archive(tmp_path / "a.ova", files)
    inspected(path)
    assert [check.algorithm for check in opened(path).checksums] == [algorithm.lower()]


def test_no_manifest_is_said_and_no_more(files: dict[str, bytes], tmp_path: Path) -> None:
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert "checksums-missing" in concern_ids(inspected(path))
    assert opened(path).checksums == ()


def test_a_manifest_of_another_name_counts_if_it_is_the_only_one(files: dict[str, bytes], tmp_path: Path) -> None:
    files["manifest.mf"] = files.pop("virtualbox.mf")
    path = appliances.archive(tmp_path / "a.ova", files)
    assert opened(path).checksums
    assert "checksums-missing" not in concern_ids(inspected(path))


def test_a_manifest_that_leaves_the_disk_out(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.mf"] = appliances.manifest({"virtualbox.ovf": files["virtualbox.ovf"]})
    path = appliances.archive(tmp_path / "a.ova", files)
    assert "checksums-incomplete" in concern_ids(inspected(path))
    assert opened(path).checksums == ()


def test_an_edited_description(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(b"2048</rasd:VirtualQuantity>", b"4096</rasd:VirtualQuantity>")
    path = appliances.archive(tmp_path / "a.ova", files)
    with pytest.raises(
        MalformedArchive, match=r"virtualbox.ovf does not have the SHA256 digest that virtualbox.mf gives"
    ) as caught:
        inspected(path)
    assert "remove the manifest" in (caught.value.hint or "")
    with pytest.raises(MalformedArchive):
        opened(path)


def test_a_manifest_that_names_what_is_not_there(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.mf"] += b"SHA1(second.vmdk)= " + b"0" * 40
    with pytest.raises(MalformedArchive, match=r"names the file 'second.vmdk', which a.ova does not have"):
        inspected(appliances.archive(tmp_path / "a.ova", files))


def test_a_manifest_with_two_digests_of_one_file(files: dict[str, bytes], tmp_path: Path) -> None:
    """By two names of it: nobody can say which of them is right."""
    files["virtualbox.mf"] += b"SHA1(./disk1.vmdk)= " + b"0" * 40
    with pytest.raises(MalformedArchive, match=r"virtualbox.mf has two digests of disk1.vmdk"):
        inspected(appliances.archive(tmp_path / "a.ova", files))


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_truncated_archive_says_what_is_missing(files: dict[str, bytes], tmp_path: Path) -> None:
    path = appliances.archive(tmp_path / "a.ova", files)
    path.write_bytes(path.read_bytes()[:200_000])
    with pytest.raises(
        MalformedArchive, match=r"cut short: member 'disk1.vmdk' has \d+ bytes at offset \d+, the archive only 200000"
    ):
        inspected(path)


def test_a_download_page_instead_of_an_appliance(tmp_path: Path) -> None:
    (tmp_path / "a.ova").write_bytes(b"<!DOCTYPE html><html>Please log in</html>" * 50)
    with pytest.raises(
        UnsupportedFormat, match=r"a.ova is called an OVA archive, and its content is not; supported kinds are ova_archive"
    ):
        detect(tmp_path / "a.ova", tmp_path)


@pytest.mark.parametrize(
    ("name", "compress"),
    [("gzip", gzip.compress), ("xz", lzma.compress), ("bzip2", bz2.compress), ("zstd", zstandard.ZstdCompressor().compress)],
)
def test_compressed_archives_are_named(
    name: str, compress: Callable[[bytes], bytes], files: dict[str, bytes], tmp_path: Path
) -> None:
    path = appliances.archive(tmp_path / "a.ova", files)
    path.write_bytes(compress(path.read_bytes()))
    with pytest.raises(UnsupportedFormat, match=f"is an? {name} file") as caught:
        detect(path, tmp_path)
    assert "first" in (caught.value.hint or "")


def test_an_archive_of_100_gib_is_looked_into_and_not_read(files: dict[str, bytes], tmp_path: Path) -> None:
    """A sparse file, its description behind the disk: what counts is how much is read."""
    del files["virtualbox.mf"]
    path = tmp_path / "a.ova"
    size = 100 << 30
    disk = tarfile.TarInfo("disk1.vmdk")
    disk.size = size
    with path.open("wb") as file:
        file.write(disk.tobuf(tarfile.GNU_FORMAT))
        file.write(files["disk1.vmdk"][:65536])
        file.seek(512 + size)
        description = tarfile.TarInfo("a.ovf")
        description.size = len(files["virtualbox.ovf"])
        file.write(description.tobuf() + files["virtualbox.ovf"])
        file.truncate(file.tell() + 2048)
    with bytes_read() as count:
        assert inspected(path).disks[0].format == "vmdk"
    assert count.bytes < 1 << 20
