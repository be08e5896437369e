"""Btrfs, read by ourselves: held against its own tools and against Linux, which wrote it."""

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.errors import DiskReadFailed, SynvirtError, UnsupportedFormat
from synvirt.guests.inside import superblocks
from synvirt.guests.inside.btrfs import trees
from synvirt.guests.inside.btrfs.subvolumes import Btrfs, Entry, Subvolume
from synvirt.guests.inside.btrfs.trees import newest
from synvirt.guests.inside.files import UnixFiles
from synvirt.guests.inside.looking import facts_of
from synvirt.sizes import MIB
from tests.guests.btrfs_images import everything, grown, made, mounted, mounted_alone, windows
from tests.guests.linux_trees import LINUX, planted
from tests.needs import need


def read_all(place: Subvolume) -> dict[str, bytes | str | None]:
    """As `everything` says it of a mounted one."""
    found: dict[str, bytes | str | None] = {}
    left = [""]
    while left:
        path = left.pop()
        entry = place.get_file_entry_by_path(path)
        assert entry is not None
        for name in [entry.get_sub_file_entry(number).name for number in range(entry.number_of_sub_file_entries)]:
            child = place.get_file_entry_by_path(f"{path}/{name}")
            assert child is not None
            found[f"{path}/{name}"] = _held(child)
            if stat.S_ISDIR(child.file_mode):
                left.append(f"{path}/{name}")
    return found


def _held(entry: Entry) -> bytes | str | None:
    if stat.S_ISDIR(entry.file_mode):
        return None
    return entry.symbolic_link_target if stat.S_ISLNK(entry.file_mode) else entry.read_buffer_at_offset(entry.get_size(), 0)


FORMS = [("4096", "crc32c"), ("16384", "xxhash"), ("65536", "sha256"), ("4096", "blake2")]


@pytest.mark.parametrize(("node", "checksum"), FORMS)
def test_every_file_is_read_as_mkfs_wrote_it(node: str, checksum: str, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    grown(tree, seed=int(node), files=200)
    image = made(tmp_path / "image", tree, "-n", node, "--csum", checksum, "-L", "the system", size=256 * MIB)
    with windows(image) as parts:
        [first, *_] = Btrfs(parts).subvolumes()
        assert read_all(first) == everything(tree)
        reported = superblocks.btrfs(parts[0])
    shown = subprocess.run(
        [need("btrfs", "btrfs-progs"), "inspect-internal", "dump-super", image], check=True, capture_output=True, text=True
    )
    superblock = dict(line.split(None, 1) for line in shown.stdout.splitlines() if len(line.split(None, 1)) == 2)
    assert (
        reported == f"btrfs «the system» {superblock['fsid']}, {superblock['bytes_used']} of {superblock['total_bytes']} bytes"
    )


def test_a_part_of_a_large_file_costs_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An initramfs is read in parts. mkfs.btrfs gives a file an extent for each MiB."""
    (root := tmp_path / "root").mkdir()
    content = os.urandom(16 * MIB)
    (root / "initrd.img").write_bytes(content)
    with windows(made(tmp_path / "image", root)) as disks:
        volume = Btrfs(disks)
        entry = next(iter(volume.subvolumes())).get_file_entry_by_path("/initrd.img")
        assert entry is not None
        asked = list[int]()
        read = volume.trees.read

        def counted(at: int, size: int) -> bytes:
            asked.append(size)
            return read(at, size)

        monkeypatch.setattr(volume.trees, "read", counted)
        assert entry.read_buffer_at_offset(4096, 14 * MIB + 512) == content[14 * MIB + 512 :][:4096]
    assert sum(asked) <= 2 * MIB


def test_parts_of_files_are_read_too(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    grown(tree, seed=3)
    image = made(tmp_path / "image", tree)
    with windows(image) as parts:
        [place, *_] = Btrfs(parts).subvolumes()
        for name, content in everything(tree).items():
            if isinstance(content, bytes):
                entry = place.get_file_entry_by_path(name)
                assert entry is not None
                for offset in (0, 1, 4095, 70_000, len(content)):
                    expected = content[offset : offset + 9000]
                    assert entry.read_buffer_at_offset(9000, offset)[: len(expected)] == expected


@pytest.mark.parametrize("compression", ["zlib", "lzo", "zstd", "none"])
def test_extents_that_linux_compressed_are_read(compression: str, tmp_path: Path) -> None:
    image = tmp_path / "image"
    options = "noatime" if compression == "none" else f"compress-force={compression}"
    with mounted([image], tmp_path / "at", options) as at:
        grown(at, seed=7, files=120)
        expected = everything(at)
    with windows(image) as parts:
        [first, *_] = Btrfs(parts).subvolumes()
        assert read_all(first) == expected


PROFILES = [("single", "single", 2), ("dup", "dup", 1), ("raid0", "raid0", 2), ("raid1", "raid1", 2), ("raid10", "raid10", 4)]
PROFILES += [("raid5", "raid1", 3), ("raid6", "raid1c3", 4), ("raid5", "raid5", 3)]


@pytest.mark.parametrize(("data", "metadata", "count"), PROFILES)
def test_profiles_of_several_devices_are_read(data: str, metadata: str, count: int, tmp_path: Path) -> None:
    images = [tmp_path / f"image{number}" for number in range(count)]
    with mounted(images, tmp_path / "at", "noatime", "-d", data, "-m", metadata) as at:
        grown(at, seed=11)
        expected = everything(at)
    with windows(*reversed(images)) as parts:
        [first, *_] = Btrfs(parts).subvolumes()
        assert read_all(first) == expected
    if data == metadata == "raid1":
        with windows(images[1]) as parts:
            [first, *_] = Btrfs(parts).subvolumes()
            assert read_all(first) == expected
    if data == metadata == "raid0":
        with windows(images[0]) as parts, pytest.raises(DiskReadFailed, match="device 2 of it is missing"):
            read_all(next(iter(Btrfs(parts).subvolumes())))


@pytest.mark.parametrize("order", [1, -1])
def test_a_mirror_that_was_away_is_not_believed(order: int, tmp_path: Path) -> None:
    """All its checksums are right, as it is what it was."""
    images, at = [tmp_path / "image1", tmp_path / "image2"], tmp_path / "at"
    with mounted(images, at, "noatime", "-d", "raid1", "-m", "raid1"):
        (at / "old").write_bytes(b"old " * 5000)
        (at / "both").write_bytes(b"then" * 5000)
    with mounted_alone(images[1], at):
        (at / "old").unlink()
        (at / "both").write_bytes(b"now " * 5000)
        grown(at, seed=4, files=20)
        expected = everything(at)
    with windows(*images[::order]) as parts:
        [first, *_] = Btrfs(parts).subvolumes()
        assert read_all(first) == expected
        assert newest(parts) is parts[order > 0]


def test_a_damaged_copy_of_a_block_is_read_from_the_other(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    grown(tree, seed=5)
    image = made(tmp_path / "image", tree, "-m", "dup")
    with windows(image) as parts:
        opened = Btrfs(parts)
        top = opened.tree(5).at
        chunk = opened.trees._chunk_of(top)
        [(_, first), (_, second)], _ = chunk.copies(top - chunk.start)
    for places, is_read in (([first], True), ([second], True), ([first, second], False)):
        clean = {at + 200: _overwritten(image, at + 200, b"\xff" * 16) for at in places}
        with windows(image) as parts:
            if is_read:
                assert read_all(next(iter(Btrfs(parts).subvolumes()))) == everything(tree)
            else:
                with pytest.raises(DiskReadFailed, match="is damaged"):
                    read_all(next(iter(Btrfs(parts).subvolumes())))
        for at, content in clean.items():
            _overwritten(image, at, content)


def _overwritten(image: Path, at: int, content: bytes) -> bytes:
    """What was there."""
    with image.open("r+b") as file:
        old = os.pread(file.fileno(), len(content), at)
        os.pwrite(file.fileno(), content, at)
    return old


def _subvolume(at: Path, *words: str) -> None:
    subprocess.run([need("btrfs", "btrfs-progs"), "subvolume", *words], cwd=at, check=True, capture_output=True)


def _system(root: Path, name: str) -> None:
    (root / "etc").mkdir()
    (root / "etc/hostname").write_text(name)


def _suse(at: Path) -> None:
    """A snapshot is the default one; what it was made from has an older system."""
    _subvolume(at, "create", "@")
    (at / "@/.snapshots/1").mkdir(parents=True)
    _subvolume(at, "create", "@/.snapshots/1/snapshot")
    _system(at / "@/.snapshots/1/snapshot", "suse")
    _subvolume(at, "snapshot", "-r", "@/.snapshots/1/snapshot", "@/.snapshots/1/before")
    (at / "@/.snapshots/1/snapshot/etc/hostname").write_text("today")
    shown = subprocess.run(["btrfs", "subvolume", "list", "."], cwd=at, check=True, capture_output=True, text=True)
    number = next(line.split()[1] for line in shown.stdout.splitlines() if line.endswith("/snapshot"))
    _subvolume(at, "set-default", number, ".")


def _fedora(at: Path) -> None:
    """The default is the topmost folder, which has no system."""
    _subvolume(at, "create", "home")
    _subvolume(at, "create", "root")
    _system(at / "root", "today")


def _debian(at: Path) -> None:
    _subvolume(at, "create", "@rootfs")
    _system(at / "@rootfs", "today")


def _odd(at: Path) -> None:
    """A name that no installer gives, behind one that was deleted."""
    for number in range(3):
        _subvolume(at, "create", f"old{number}")
        _system(at / f"old{number}", "old")
        _subvolume(at, "delete", "--commit-each", f"old{number}")
    _subvolume(at, "create", "my system")
    _system(at / "my system", "today")


def _nested(at: Path) -> None:
    """A folder of the system is a subvolume of its own."""
    _subvolume(at, "create", "etc")
    (at / "etc/hostname").write_text("today")


@pytest.mark.parametrize("layout", [_suse, _fedora, _debian, _odd, _nested])
def test_the_system_is_found_in_its_subvolume(layout: Callable[[Path], None], tmp_path: Path) -> None:
    image = tmp_path / "image"
    with mounted([image], tmp_path / "at", "noatime") as at:
        layout(at)
    with windows(image) as parts:
        names = (UnixFiles(one).read("/etc/hostname") for one in Btrfs(parts).subvolumes())
        assert next(filter(None, names)) == "today"


def test_features_that_are_not_read_are_named(tmp_path: Path) -> None:
    image = made(tmp_path / "image")
    with image.open("r+b") as file:
        file.seek(0x10000 + 0xBC)
        file.write((1 << 14 | 1).to_bytes(8, "little"))
    with windows(image) as parts, pytest.raises(SynvirtError, match="0x4000"):
        Btrfs(parts)


def test_a_hostile_one_takes_no_longer_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    grown(tree, seed=9)
    image = made(tmp_path / "image", tree)
    monkeypatch.setattr(trees, "STEPS_MAX", 500)
    with windows(image) as parts, pytest.raises(UnsupportedFormat, match="more in it than is read"):
        read_all(next(iter(Btrfs(parts).subvolumes())))


def test_a_system_on_two_disks_is_one(tmp_path: Path) -> None:
    disks = [tmp_path / "disk1", tmp_path / "disk2"]
    with mounted(disks, tmp_path / "at", "compress-force=zstd", "-d", "raid0", "-m", "raid0") as at:
        planted(at)
    found = facts_of([str(disk) for disk in disks])
    assert LINUX.items() <= found.items()
    assert [item for item in found if item.startswith(("volume", "not read"))] == ["volume disk 1 from byte 0 on"]
    alone = facts_of([str(disks[0])])
    why = "its file system cannot be read: device 2 of it is missing"
    assert alone["not read disk 1 from byte 0 on"] == why
