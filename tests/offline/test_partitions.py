"""Partition tables as real tools write them."""

import subprocess
from pathlib import Path

import pytest

from synvirt.disks.raw.files import RawReader
from synvirt.machines.partitions import UNKNOWN, Layout, look
from tests.needs import need

MIB = 1 << 20
ESP, BIOS, LINUX = (
    "C12A7328-F81F-11D2-BA4B-00A0C93EC93B",
    "21686148-6449-6E6F-744E-656564454649",
    "0FC63DAF-8483-4772-8E79-3D69D8477DE4",
)
RESERVED, BASIC = "E3C9E316-0B5C-4DB8-817D-F92DF00215AE", "EBD0A0A2-B9E5-4433-87C0-68B6B72699C7"
LDM_DATA = "AF9B60A0-1431-4F62-BC68-3311714A69AD"


def disk(path: Path, label: str, *types: str) -> Path:
    """8 MiB a partition, by sfdisk."""
    program = need("sfdisk", "fdisk")
    with path.open("wb") as file:
        file.truncate(8 * MIB * (len(types) + 2))
    script = f"label: {label}\n" + "".join(f"size=8MiB, type={kind}\n" for kind in types)
    subprocess.run([program, "-q", str(path)], input=script.encode(), check=True, capture_output=True, timeout=30)
    return path


def seen(path: Path) -> Layout:
    reader = RawReader(str(path))
    try:
        return look(reader)
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("label", "types", "expected"),
    [
        ("gpt", (ESP, LINUX), Layout("uefi", "linux")),
        ("gpt", (BIOS, LINUX), Layout("bios", "linux")),
        ("gpt", (BIOS, ESP, LINUX), Layout("bios", "linux")),  # Debian's cloud images boot either way
        ("gpt", (ESP, RESERVED, BASIC), Layout("uefi", "windows")),
        ("gpt", (ESP, RESERVED, LDM_DATA), Layout("uefi", "windows", dynamic=True)),
        ("dos", ("83",), Layout("bios", "linux")),
        ("dos", ("7", "7"), Layout("bios", "windows")),
        ("dos", ("42",), Layout("bios", "windows", dynamic=True)),
        ("dos", ("a5",), Layout("bios", "other")),
        ("dos", ("c",), Layout("bios", None)),
        ("gpt", (), Layout(None, None)),
    ],
)
def test_tables(label: str, types: tuple[str, ...], expected: Layout, tmp_path: Path) -> None:
    assert seen(disk(tmp_path / "disk", label, *types)) == expected


@pytest.mark.parametrize(("signature", "field"), [(b"\xeb\x58\x90-FVE-FS-", "bitlocker"), (b"LUKS\xba\xbe\0\2", "luks")])
def test_encrypted_volumes(signature: bytes, field: str, tmp_path: Path) -> None:
    path = disk(tmp_path / "disk", "gpt", ESP, LINUX)
    with path.open("r+b") as file:
        file.seek(9 * MIB)
        file.write(signature)
    assert getattr(seen(path), field)


def test_a_disk_without_a_table_gives_no_facts(tmp_path: Path) -> None:
    for content in (b"", b"\0" * MIB, b"x" * 511, b"x" * 4096):
        (tmp_path / "disk").write_bytes(content)
        assert seen(tmp_path / "disk") == UNKNOWN


def test_a_protective_mbr_without_a_table_behind_it(tmp_path: Path) -> None:
    path = disk(tmp_path / "disk", "gpt", ESP)
    data = bytearray(path.read_bytes())
    data[512:520] = b"destroyd"
    path.write_bytes(data)
    assert seen(path) == UNKNOWN


def test_a_table_that_points_anywhere_is_looked_at_nevertheless(tmp_path: Path) -> None:
    path = disk(tmp_path / "disk", "gpt", ESP, LINUX)
    whole = path.read_bytes()[: 64 << 10]
    for at in (*range(512 + 72, 512 + 92), *range(1024, 1024 + 48)):
        for bits in (0x01, 0x80, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ bits]) + whole[at + 1 :])
            assert isinstance(seen(path), Layout)


def test_a_table_that_the_disk_cuts_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = disk(tmp_path / "disk", "gpt", ESP, LINUX)
    whole = path.read_bytes()
    for end in range(1024, 1024 + 3 * 128):
        path.write_bytes(whole[:end])
        assert seen(path) == (UNKNOWN if end < 1024 + 128 else Layout("uefi", "linux" if end >= 1024 + 256 else None))
