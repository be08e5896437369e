"""The other files that a qcow2 image names: found within the import root, never outside it, and read as what they are."""

import os
import struct
from pathlib import Path

import pytest

from synvirt.blocks import DiskReader
from synvirt.disks import open_reader
from synvirt.disks.qcow2 import named_files
from synvirt.disks.qcow2.header import L1_BYTES_MAX
from synvirt.disks.qcow2.named_files import CHAIN_MAX
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.errors import HostPathRejected, MalformedArchive, UnsupportedFormat
from tests.contracts.readers import read_all
from tests.disks.block_images import qemu
from tests.running.processes import open_files

KIB, MIB = 1 << 10, 1 << 20


def opened(root: Path | None, name: str, folder: Path | None = None) -> DiskReader:
    path = (root or folder or Path()) / name
    return open_reader(
        ImageSpec(format="qcow2", over=RawSpec(path=str(path)), root=None if root is None else str(root), name=name)
    )


def overlay(folder: Path, name: str, backing: str, backing_format: str = "raw", size: int = MIB) -> Path:
    """An empty image over the file that it calls `backing`."""
    return named(folder, name, backing, ["-u", "-F", backing_format, "-b"], str(size))


def with_data_file(folder: Path, name: str, data_file: str) -> Path:
    """An empty image that calls its data file `data_file`."""
    return named(folder, name, data_file, ["-o"], str(MIB), "data_file=")


def named(folder: Path, name: str, other: str, options: list[str], size: str, prefix: str = "") -> Path:
    """qemu-img makes the image with an honest name of equal length, which is then written over."""
    honest = "_" * len(other.encode())
    qemu("qemu-img", "create", "-q", "-f", "qcow2", *options, prefix + honest, name, size, cwd=folder)
    image = folder / name
    image.write_bytes(image.read_bytes().replace(honest.encode(), other.encode(), 1))
    return image


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An import root with a secret beside it."""
    (tmp_path / "secret").write_bytes(b"secret" * 100_000)
    folder = tmp_path / "imports"
    folder.mkdir()
    (folder / "base.raw").write_bytes(b"\1" * (300 * KIB))
    return folder


def outside(root: Path) -> list[str]:
    secret = str(root.parent / "secret")
    (root / "vm").mkdir()
    (root / "link").symlink_to(secret)
    (root / "folder").symlink_to(root.parent)
    return [
        "../secret",
        "vm/../../secret",
        secret,
        "/etc/passwd",
        "link",
        "folder/secret",
        "/proc/self/fd/0",
        f"file:{secret}",
        f'json:{{"driver":"raw","file":{{"driver":"file","filename":"{secret}"}}}}',
        "nbd:unix:/run/nbd.sock",
        "https://example.com/disk.raw",
        "/dev/zero",
    ]


def test_a_file_outside_the_import_root_is_never_opened(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = outside(root)
    opens: list[str] = []
    real_open = os.open

    def watched(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = real_open(path, flags, mode, dir_fd=dir_fd)
        if not flags & os.O_PATH:
            opens.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        return descriptor

    for name in names:
        images = [overlay(root, "overlay", name), with_data_file(root, "split", name)]
        for image in images:
            opens.clear()
            with monkeypatch.context() as patched:
                patched.setattr(os, "open", watched)
                with pytest.raises(HostPathRejected):
                    opened(root, image.name)
            assert opens == [str(image)], name


def test_without_an_import_root_no_other_file_is_opened(root: Path) -> None:
    for image in (overlay(root, "overlay", "base.raw"), with_data_file(root, "split", "base.raw")):
        with pytest.raises(HostPathRejected, match="needs another file"):
            opened(None, image.name, root)


def test_names_are_relative_to_the_image_that_says_them(root: Path) -> None:
    """Each in its own folder, one up and one down, all within the root; an absolute name within it is as good."""
    for folder in ("templates", "vm"):
        (root / folder).mkdir()
    (root / "templates" / "base.raw").write_bytes(b"\2" * (300 * KIB))
    overlay(root / "templates", "middle", "base.raw")
    overlay(root / "vm", "relative", "../templates/middle", "qcow2")
    overlay(root / "vm", "absolute", str(root / "templates" / "middle"), "qcow2")
    for name in ("vm/relative", "vm/absolute"):
        reader = opened(root, name)
        assert read_all(reader) == b"\2" * (300 * KIB) + bytes(MIB - 300 * KIB)
        reader.close()


def test_a_missing_file_is_named(root: Path) -> None:
    overlay(root, "overlay", "gone.raw")
    with pytest.raises(MalformedArchive, match=r"'gone.raw', which is not there"):
        opened(root, "overlay")


@pytest.mark.parametrize("where", ["/var/lib/libvirt/images", "", "{root}/gone"])
def test_a_backing_file_of_another_host_is_refused_with_the_way_that_helps(root: Path, where: str) -> None:
    """libvirt's snapshots name the disk below by its whole path. To copy it beside the image, where it is, does not help."""
    (root / "base.raw").write_bytes(bytes(MIB))
    image = overlay(root, "overlay", f"{where.format(root=root)}/base.raw", "raw")
    with pytest.raises((HostPathRejected, MalformedArchive), match=r"base\.raw") as caught:
        opened(root, "overlay")
    assert "qemu-img rebase -u" in (caught.value.hint or "")
    qemu("qemu-img", "rebase", "-u", "-b", "base.raw", "-F", "raw", image.name, cwd=root)
    opened(root, "overlay").close()


def test_a_raw_backing_file_is_raw_whatever_its_guest_wrote_into_it(root: Path) -> None:
    """A guest may write a qcow2 header, with a backing file of its choice, to the start of its raw disk."""
    overlay(root, "trap", str(root.parent / "secret"))
    trap = (root / "trap").read_bytes()
    overlay(root, "overlay", "trap", "raw")
    reader = opened(root, "overlay")
    assert read_all(reader)[: len(trap)] == trap
    reader.close()


def without_format(image: Path) -> Path:
    """The header extension that says the backing file's format becomes one that nobody knows, as old images have none."""
    content = bytearray(image.read_bytes())
    at = content.index(struct.pack(">I", 0xE2792ACA))
    content[at : at + 4] = struct.pack(">I", 0x12345678)
    image.write_bytes(content)
    return image


def test_a_backing_file_of_no_stated_format(root: Path) -> None:
    """What looks like a raw disk is one; an image that needs no other file is what it looks like; all else is refused."""
    without_format(overlay(root, "over raw", "base.raw"))
    reader = opened(root, "over raw")
    assert read_all(reader)[: 300 * KIB] == b"\1" * (300 * KIB)
    reader.close()

    qemu("qemu-img", "convert", "-f", "raw", "-O", "qcow2", "base.raw", "base.qcow2", cwd=root)
    without_format(overlay(root, "over qcow2", "base.qcow2", "qcow2"))
    reader = opened(root, "over qcow2")
    assert read_all(reader)[: 300 * KIB] == b"\1" * (300 * KIB)
    reader.close()

    overlay(root, "names another", "base.raw")
    with_data_file(root, "keeps its data elsewhere", "base.raw")
    qemu("qemu-img", "convert", "-f", "raw", "-O", "vmdk", "base.raw", "base.vmdk", cwd=root)
    for base in ("names another", "keeps its data elsewhere", "base.vmdk"):
        without_format(overlay(root, "overlay", base, "qcow2"))
        with pytest.raises(UnsupportedFormat, match="does not say its format") as failure:
            opened(root, "overlay")
        assert "qemu-img rebase" in str(failure.value.hint)


def test_a_backing_format_that_is_not_read_is_refused(root: Path) -> None:
    overlay(root, "overlay", "base.raw", "raw")
    content = (root / "overlay").read_bytes()
    (root / "overlay").write_bytes(content.replace(b"\x00\x00\x00\x03raw", b"\x00\x00\x00\x03dmg", 1))
    with pytest.raises(UnsupportedFormat, match="'dmg'"):
        opened(root, "overlay")


def test_a_backing_file_of_another_image_format_is_read(root: Path) -> None:
    qemu("qemu-img", "convert", "-f", "raw", "-O", "vdi", "base.raw", "base.vdi", cwd=root)
    overlay(root, "overlay", "base.vdi", "vdi")
    reader = opened(root, "overlay")
    assert read_all(reader)[: 300 * KIB] == b"\1" * (300 * KIB)
    reader.close()


@pytest.mark.parametrize("names", [("a", "a"), ("b", "a"), ("b", "c", "a")])
def test_a_chain_that_bites_its_tail_is_refused(root: Path, names: tuple[str, ...]) -> None:
    for image, backing in zip("abc", names, strict=False):
        overlay(root, image, backing, "qcow2")
    with pytest.raises(MalformedArchive, match="loop"):
        opened(root, "a")


def test_a_loop_through_a_hard_link_is_a_loop(root: Path) -> None:
    overlay(root, "a", "b", "qcow2")
    (root / "b").hardlink_to(root / "a")
    with pytest.raises(MalformedArchive, match="loop"):
        opened(root, "a")


def test_a_chain_has_an_end(root: Path) -> None:
    """As long as may be it is read, by way of every layer; one longer is refused, and no descriptor is left open."""
    for number in range(CHAIN_MAX):
        overlay(root, str(number + 1), str(number), "qcow2" if number else "raw")
    (root / "0").write_bytes(b"\1" * (64 * KIB))
    reader = opened(root, str(CHAIN_MAX))
    assert read_all(reader)[: 64 * KIB] == b"\1" * (64 * KIB)
    assert [extent.zero for extent in reader.extents()] == [False, True]
    reader.close()
    overlay(root, "too long", str(CHAIN_MAX), "qcow2")
    with pytest.raises(MalformedArchive, match=f"more than {CHAIN_MAX} files"):
        opened(root, "too long")
    assert open_files(root) == []


def test_a_chain_of_huge_tables_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each alone is allowed; together they would take the memory of the worker, and here an eighth of that. The files are
    holes: they cost nothing."""
    assert 2 * L1_BYTES_MAX <= named_files._CHAIN_L1_BYTES_MAX < 4 * L1_BYTES_MAX
    monkeypatch.setattr(named_files, "_CHAIN_L1_BYTES_MAX", named_files._CHAIN_L1_BYTES_MAX // 8)
    entries = L1_BYTES_MAX // 8 // 8
    for number in range(4):
        overlay(root, str(number + 1), str(number), "qcow2" if number else "raw")
        image = root / str(number + 1)
        with image.open("r+b") as file:
            file.seek(24)
            file.write(struct.pack(">Q", entries * (512 << 20)))  # virtual size
            file.seek(36)
            file.write(struct.pack(">IQ", entries, 1 << 20))  # L1 entries, and where they are
            file.truncate(64 * MIB)
    (root / "0").write_bytes(b"")
    opened(root, "2").close()
    with pytest.raises(MalformedArchive, match="L1 tables of its backing chain"):
        opened(root, "4")
