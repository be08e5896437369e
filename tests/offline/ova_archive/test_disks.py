"""Disks of appliances in archives: their formats, chunks and compression, and what they tell about the guest."""

import gzip
import re
import zlib
from pathlib import Path

import pytest

from synvirt import programs
from synvirt.disks import open_reader
from synvirt.disks.specs import RawSpec
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat
from synvirt.offline import OpenedDisk
from synvirt.offline.ovf import members
from synvirt.sizes import MIB
from tests.contracts.readers import read_all
from tests.offline import appliances, test_partitions
from tests.offline.ova_archive.reading import concern_ids, inspected, member_bytes, opened

# ── disks ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("image_format", ["qcow2", "vpc", "vhdx", "vdi", "vmdk"])
def test_any_image_inside_is_known_by_its_first_bytes(files: dict[str, bytes], image_format: str, tmp_path: Path) -> None:
    disk = appliances.image(tmp_path, "disk1.vmdk", image_format, appliances.raw_disk(12 * MIB))
    files["disk1.vmdk"] = disk.read_bytes()
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    vm = inspected(path)
    assert (vm.disks[0].format, vm.disks[0].capacity_bytes) == ({"vpc": "vhd"}.get(image_format, image_format), 12 * MIB)
    assert "disk-capacity-differs:vmdisk1" in concern_ids(vm)
    spec = opened(path).reader
    assert spec.format == vm.disks[0].format


def test_a_raw_disk_is_a_range_of_the_archive(tmp_path: Path) -> None:
    raw = appliances.raw_disk()
    name = "90b62105-4ae8-4a4b-826b-dfe970ae28d9/25534d4f-d07d-459d-a9ef-3ed733cbcdef"
    path = appliances.archive(tmp_path / "a.ova", {"vm.ovf": appliances.description("ovirt_storage_domain"), name: raw})
    assert inspected(path).disks[0].capacity_bytes == len(raw)
    found = opened(path, "25534d4f-d07d-459d-a9ef-3ed733cbcdef")
    assert isinstance(found.reader, RawSpec)
    assert member_bytes(path, found) == raw


def test_a_guest_cannot_turn_its_raw_disk_into_an_image(tmp_path: Path) -> None:
    """Whoever can write to a raw disk can write a qcow2 header with a backing file into its first sector."""
    raw = b"QFI\xfb\0\0\0\3" + appliances.raw_disk()[8:]
    name = "90b62105-4ae8-4a4b-826b-dfe970ae28d9/25534d4f-d07d-459d-a9ef-3ed733cbcdef"
    path = appliances.archive(tmp_path / "a.ova", {"vm.ovf": appliances.description("ovirt_storage_domain"), name: raw})
    assert inspected(path).disks[0].format == "raw"
    assert isinstance(opened(path, "25534d4f-d07d-459d-a9ef-3ed733cbcdef").reader, RawSpec)


def test_a_vmdk_that_is_none(files: dict[str, bytes], tmp_path: Path) -> None:
    files["disk1.vmdk"] = b"\0" * 4096
    del files["virtualbox.mf"]
    with pytest.raises(MalformedArchive, match=r"disk1.vmdk is to be a vmdk image, but does not begin like one"):
        inspected(appliances.archive(tmp_path / "a.ova", files))


def test_a_missing_disk(files: dict[str, bytes], tmp_path: Path) -> None:
    del files["virtualbox.mf"], files["disk1.vmdk"]
    with pytest.raises(MalformedArchive, match=r"a.ova has no file 'disk1.vmdk', which its description needs"):
        inspected(appliances.archive(tmp_path / "a.ova", files))


def test_a_differencing_disk_is_a_critical_concern(files: dict[str, bytes], tmp_path: Path) -> None:
    files["virtualbox.ovf"] = files["virtualbox.ovf"].replace(
        b'ovf:fileRef="file1"', b'ovf:fileRef="file1" ovf:parentRef="vmdisk0"'
    )
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert "disk-unreadable:vmdisk1" in concern_ids(inspected(path))
    with pytest.raises(UnsupportedFormat, match="holds only what differs from disk 'vmdisk0'"):
        opened(path)


def test_a_qcow2_with_a_backing_file(files: dict[str, bytes], tmp_path: Path) -> None:
    appliances.image(tmp_path, "base.qcow2", "qcow2", appliances.raw_disk())
    overlay = tmp_path / "overlay"
    programs.run(["qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", str(overlay)], timeout_s=30)
    files["disk1.vmdk"] = overlay.read_bytes()
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    assert "disk-unreadable:vmdisk1" in concern_ids(inspected(path))
    with pytest.raises(HostPathRejected, match=r"base.qcow2"):
        open_reader(opened(path).reader)


def test_an_encrypted_disk_is_a_critical_concern(files: dict[str, bytes], tmp_path: Path) -> None:
    disk = tmp_path / "encrypted.qcow2"
    secret = ["--object", "secret,id=s,data=abc"]
    # LUKS, whose header is in the same place, would have qemu-img measure a processor that others are using.
    options = ["-o", "encrypt.format=aes,encrypt.key-secret=s"]
    programs.run(["qemu-img", "create", "-q", *secret, "-f", "qcow2", *options, str(disk), "8M"], timeout_s=60)
    files["disk1.vmdk"] = disk.read_bytes()
    del files["virtualbox.mf"]
    path = appliances.archive(tmp_path / "a.ova", files)
    (critical,) = [concern for concern in inspected(path).concerns if concern.category == "Critical"]
    assert "encrypt" in critical.assessment


# ── files that are not what they hold ───────────────────────────────────────────────────────────────────


def chunked(data: bytes, size: int) -> dict[str, bytes]:
    return {f"disk1.vmdk.{number:09d}": data[at : at + size] for number, at in enumerate(range(0, len(data), size))}


def content(disk: OpenedDisk) -> bytes:
    reader = open_reader(disk.reader)
    try:
        return read_all(reader)
    finally:
        reader.close()


def with_file_attributes(files: dict[str, bytes], attributes: str) -> dict[str, bytes]:
    """The appliance without manifest and disk, its file reference changed."""
    old = b'ovf:href="disk1.vmdk"'
    assert old in files["virtualbox.ovf"]
    return {"virtualbox.ovf": files["virtualbox.ovf"].replace(old, old + f" {attributes}".encode())}


def test_a_disk_in_chunks(files: dict[str, bytes], tmp_path: Path) -> None:
    disk = files["disk1.vmdk"]
    packed = {**with_file_attributes(files, f'ovf:chunkSize="65536" ovf:size="{len(disk)}"'), **chunked(disk, 65536)}
    packed["virtualbox.mf"] = appliances.manifest(packed)
    path = appliances.archive(tmp_path / "a.ova", packed)
    vm = inspected(path)
    assert (vm.disks[0].format, vm.disks[0].capacity_bytes) == ("vmdk", 8 * MIB)
    assert "checksums-incomplete" not in concern_ids(vm)
    assert content(opened(path)) == appliances.raw_disk(seed=0)
    assert len(opened(path).checksums) == -(-len(disk) // 65536)


@pytest.mark.parametrize("gone", ["first", "middle", "last"])
def test_a_missing_chunk(files: dict[str, bytes], gone: str, tmp_path: Path) -> None:
    disk = files["disk1.vmdk"]
    chunks = chunked(disk, 65536)
    del chunks[sorted(chunks)[{"first": 0, "middle": 3, "last": -1}[gone]]]
    packed = {**with_file_attributes(files, f'ovf:chunkSize="65536" ovf:size="{len(disk)}"'), **chunks}
    with pytest.raises(MalformedArchive, match="is cut into chunks, of which"):
        inspected(appliances.archive(tmp_path / "a.ova", packed))


@pytest.mark.parametrize(
    ("gone", "message"),
    [
        ((), None),
        ((3,), "of which 3 are there, all of 2500000 bytes; the disk has 8388608"),
        ((1, 2, 3), "of which 1 are there, all of 2500000 bytes; the disk has 8388608"),
        ((1,), "of which 1 are there, all of 2500000 bytes; the disk has 8388608"),
    ],
)
def test_missing_chunks_of_a_raw_disk_whose_size_as_a_file_is_not_said(
    files: dict[str, bytes], gone: tuple[int, ...], message: str | None, tmp_path: Path
) -> None:
    """The last chunk alone may be shorter: behind one that is not, of a raw disk that is too small, another one is missing."""
    disk, chunk_bytes = appliances.raw_disk(), 2_500_000
    chunks = chunked(disk, chunk_bytes)
    packed = with_file_attributes(files, f'ovf:chunkSize="{chunk_bytes}"')
    raw = b'ovf:format="http://en.wikipedia.org/wiki/Byte"'
    packed["virtualbox.ovf"] = re.sub(rb'ovf:format="[^"]*"', raw, packed["virtualbox.ovf"])
    kept = {name: data for number, (name, data) in enumerate(chunks.items()) if number not in gone}
    path = appliances.archive(tmp_path / "a.ova", {**packed, **kept})
    if message is None:
        assert "disk-capacity-differs:vmdisk1" not in concern_ids(inspected(path))
        assert content(opened(path)) == disk
        return
    for read in (inspected, opened):
        with pytest.raises(MalformedArchive, match=message):
            read(path)


def test_a_chunk_of_another_length(files: dict[str, bytes], tmp_path: Path) -> None:
    chunks = chunked(files["disk1.vmdk"], 65536)
    chunks["disk1.vmdk.000000001"] = chunks["disk1.vmdk.000000001"][:-1]
    packed = {**with_file_attributes(files, 'ovf:chunkSize="65536"'), **chunks}
    with pytest.raises(MalformedArchive, match=r"disk1.vmdk.000000001 has 65535 bytes, where a chunk has 65536"):
        inspected(appliances.archive(tmp_path / "a.ova", packed))


def test_a_disk_in_gzip(files: dict[str, bytes], tmp_path: Path) -> None:
    packed = {**with_file_attributes(files, 'ovf:compression="gzip"'), "disk1.vmdk": gzip.compress(files["disk1.vmdk"])}
    packed["virtualbox.mf"] = appliances.manifest(packed)
    path = appliances.archive(tmp_path / "a.ova", packed)
    vm = inspected(path)
    assert (vm.disks[0].format, vm.disks[0].capacity_bytes) == ("vmdk", 8 * MIB)
    assert "disk-compressed:vmdisk1" in concern_ids(vm)
    assert content(opened(path)) == appliances.raw_disk(seed=0)
    (checksum,) = opened(path).checksums
    assert checksum.length == len(packed["disk1.vmdk"])


def test_a_disk_in_gzip_in_chunks(files: dict[str, bytes], tmp_path: Path) -> None:
    packed = with_file_attributes(files, 'ovf:compression="gzip" ovf:chunkSize="50000"')
    path = appliances.archive(tmp_path / "a.ova", {**packed, **chunked(gzip.compress(files["disk1.vmdk"]), 50000)})
    assert inspected(path).disks[0].format == "vmdk"
    assert content(opened(path)) == appliances.raw_disk(seed=0)


def test_identity_is_no_compression(files: dict[str, bytes], tmp_path: Path) -> None:
    packed = {**with_file_attributes(files, 'ovf:compression="identity"'), "disk1.vmdk": files["disk1.vmdk"]}
    assert content(opened(appliances.archive(tmp_path / "a.ova", packed))) == appliances.raw_disk(seed=0)


def test_another_compression_is_a_critical_concern(files: dict[str, bytes], tmp_path: Path) -> None:
    packed = {**with_file_attributes(files, 'ovf:compression="xz"'), "disk1.vmdk": b"x"}
    path = appliances.archive(tmp_path / "a.ova", packed)
    assert "disk-unreadable:vmdisk1" in concern_ids(inspected(path))
    with pytest.raises(UnsupportedFormat, match=r"disk1.vmdk is compressed by 'xz'; gzip is read"):
        opened(path)


def test_a_file_that_is_to_be_gzip_and_is_not(files: dict[str, bytes], tmp_path: Path) -> None:
    packed = {**with_file_attributes(files, 'ovf:compression="gzip"'), "disk1.vmdk": files["disk1.vmdk"]}
    with pytest.raises(MalformedArchive, match=r"disk1.vmdk is to be a gzip file"):
        inspected(appliances.archive(tmp_path / "a.ova", packed))


def test_a_gzip_bomb_in_an_appliance_is_refused_by_the_disks_size(files: dict[str, bytes], tmp_path: Path) -> None:
    packer = zlib.compressobj(wbits=31)  # as gzip does; never whole in memory
    bomb = packer.compress(files["disk1.vmdk"]) + b"".join(packer.compress(bytes(MIB)) for _ in range(256)) + packer.flush()
    path = appliances.archive(tmp_path / "a.ova", {**with_file_attributes(files, 'ovf:compression="gzip"'), "disk1.vmdk": bomb})
    with pytest.raises(MalformedArchive, match="larger than the disk in it can be"):
        content(opened(path))


def test_a_blank_disk_needs_no_file(files: dict[str, bytes], tmp_path: Path) -> None:
    text = files["virtualbox.ovf"].replace(b' ovf:fileRef="file1"', b"")
    path = appliances.archive(tmp_path / "a.ova", {"a.ovf": text, "disk1.vmdk": files["disk1.vmdk"]})
    vm = inspected(path)
    assert vm.disks[0].capacity_bytes == 8 * MIB
    assert not [concern for concern in vm.concerns if concern.category == "Critical"]
    assert content(opened(path)) == bytes(8 * MIB)


# ── what the disks tell ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("description", "family"),
    [("", "windows"), ("Other (64-bit)", "windows"), ("FreeBSD 13", "other"), ("Debian GNU/Linux 12", "linux")],
)
def test_a_guest_that_is_not_named_is_reported_by_its_partitions(description: str, family: str, tmp_path: Path) -> None:
    """A Windows guest whose exporter says nothing of it needs its virtio drivers all the same."""
    raw = test_partitions.disk(tmp_path / "disk", "gpt", test_partitions.ESP, test_partitions.RESERVED).read_bytes()
    text = appliances.description("qemu_user").replace(
        b'<OperatingSystemSection ovf:id="1"/>',
        f'<OperatingSystemSection ovf:id="1"><Description>{description}</Description></OperatingSystemSection>'.encode(),
    )
    image = appliances.image(tmp_path, "disk1.qcow2", "qcow2", raw).read_bytes()
    vm = inspected(appliances.archive(tmp_path / "a.ova", {"a.ovf": text, "disk1.qcow2": image}))
    assert vm.guest_os.family == family
    assert ("guest-unknown" in concern_ids(vm)) == (family == "other")


@pytest.mark.parametrize(
    ("types", "element", "firmware"),
    [
        ((test_partitions.ESP, test_partitions.LINUX), "", "uefi"),
        ((test_partitions.BIOS, test_partitions.ESP, test_partitions.LINUX), "", "bios"),
        ((test_partitions.ESP, test_partitions.LINUX), '<Config key="firmware" value="bios"/>', "bios"),
        ((test_partitions.ESP, test_partitions.LINUX), '<Config key="firmware" value="efi"/>', "uefi"),
    ],
)
def test_firmware_that_is_not_said_is_what_the_disk_boots_by(
    types: tuple[str, ...], element: str, firmware: str, tmp_path: Path
) -> None:
    """The standard has no word for it: AWS and handmade descriptions leave it out, and a UEFI disk would not start by BIOS."""
    raw = test_partitions.disk(tmp_path / "disk", "gpt", *types).read_bytes()
    end = b"</VirtualHardwareSection>"
    text = appliances.description("qemu_user").replace(end, element.encode() + end)
    image = appliances.image(tmp_path, "disk1.qcow2", "qcow2", raw).read_bytes()
    vm = inspected(appliances.archive(tmp_path / "a.ova", {"a.ovf": text, "disk1.qcow2": image}))
    assert vm.firmware == firmware
    assert ("uefi-state-lost" in concern_ids(vm)) == (firmware == "uefi")


@pytest.mark.parametrize("ovf", sorted(appliances.DISKS))
def test_the_disks_alone_are_those_of_the_machine(ovf: str, tmp_path: Path) -> None:
    """As the command line opens them, which does not wait for all that a machine is made of."""
    path = appliances.archive(tmp_path / "a.ova", appliances.appliance(ovf))
    assert list(members.disks(path, tmp_path).items()) == [(disk.key, opened(path, disk.key)) for disk in inspected(path).disks]


def test_a_disk_that_two_items_name_is_there_once_and_one_that_none_names_comes_last(
    files: dict[str, bytes], tmp_path: Path
) -> None:
    text = files.pop("virtualbox.ovf").decode()
    del files["virtualbox.mf"]
    disk = re.search(r"<Disk [^>]*>", text)
    assert disk is not None
    first = disk[0].replace('diskId="vmdisk1"', 'diskId="unnamed"')
    assert first != disk[0]
    item = re.search(r"<Item>(?:(?!</Item>).)*/disk/vmdisk1.*?</Item>", text, re.DOTALL)
    assert item is not None
    text = text.replace(disk[0], first + disk[0]).replace(item[0], item[0] * 2)
    path = appliances.archive(tmp_path / "a.ova", {"virtualbox.ovf": text.encode(), **files})
    vm = inspected(path)
    assert [disk.key for disk in vm.disks] == list(members.disks(path, tmp_path)) == ["vmdisk1", "unnamed"]
    assert {"disk-named-twice:vmdisk1", "disk-unattached:unnamed"} <= concern_ids(vm)
