"""What file systems say of themselves, held against what their own tools say."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from synvirt.errors import DiskReadFailed
from synvirt.guests.inside import looker, superblocks
from synvirt.guests.inside.seekable import Bytes
from synvirt.sizes import MIB
from tests.guests.btrfs_images import windows
from tests.needs import need

UUID = "11111111-2222-3333-4444-555555555555"


def printed(*words: str | Path) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def number(name: str, text: str) -> int:
    found = re.search(rf"^\s*{re.escape(name)}\s*[:=]\s*(\d+)", text, re.MULTILINE)
    assert found, f"{name} in {text}"
    return int(found[1])


def superblock_of(image: Path) -> str:
    """Also where the library does not read the rest of it."""
    with windows(image) as parts:
        found = looker.opened(parts)
        assert found is not None
        return found[0]


EXT = [("ext2", ""), ("ext3", ""), ("ext4", ""), ("ext4", "^64bit"), ("ext4", "bigalloc"), ("ext4", "meta_bg,^resize_inode")]


@pytest.mark.parametrize(("kind", "features"), EXT)
@pytest.mark.parametrize("block", ["1024", "4096"])
def test_ext(kind: str, features: str, block: str, tmp_path: Path) -> None:
    tree, image = tmp_path / "tree", tmp_path / "image"
    (tree / "folder").mkdir(parents=True)
    (tree / "folder/file").write_bytes(b"synvirt " * MIB)
    options = ["-O", features] if features else []
    label = ["-L", "a label", "-U", UUID, "-b", block]
    subprocess.run([need(f"mkfs.{kind}", "e2fsprogs"), "-q", "-F", *label, *options, "-d", tree, image, "200M"], check=True)
    shown = printed(need("dumpe2fs", "e2fsprogs"), "-h", image)
    size, blocks, free = (number(name, shown) for name in ("Block size", "Block count", "Free blocks"))
    used = "" if "meta_bg" in features else f", {(blocks - free) * size} of {blocks * size} bytes"
    assert superblock_of(image) == f"{kind} «a label» {UUID}{used}"


def test_xfs(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(400 * MIB)
    label = ["-L", "a label", "-m", f"uuid={UUID}"]
    subprocess.run([need("mkfs.xfs", "xfsprogs"), "-q", *label, image], check=True)
    shown = printed(need("xfs_db", "xfsprogs"), "-r", "-c", "sb 0", "-c", "print", image)
    size, blocks, free = (number(name, shown) for name in ("blocksize", "dblocks", "fdblocks"))
    assert superblock_of(image) == f"xfs «a label» {UUID}, {(blocks - free) * size} of {blocks * size} bytes"


def test_ntfs(tmp_path: Path) -> None:
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(100 * MIB)
    printed(need("mkntfs", "ntfs-3g"), "-q", "-F", "-Q", "-L", "a label", image)
    shown = printed(need("ntfsinfo", "ntfs-3g"), "-m", image)
    cluster, clusters, free = (number(name, shown) for name in ("Cluster Size", "Volume Size in Clusters", "Free Clusters"))
    found = re.fullmatch(r"ntfs «a label» [0-9a-f]{16}, (\d+) of (\d+) bytes", superblock_of(image))
    assert found
    assert (int(found[1]), int(found[2]) // cluster) == ((clusters - free) * cluster, clusters)


@pytest.mark.parametrize("read", [superblocks.ext4, superblocks.xfs, superblocks.btrfs])
def test_one_that_is_cut_is_damage(read: Callable[[Bytes], str], tmp_path: Path) -> None:
    for size in (0, 40):
        (tmp_path / "image").write_bytes(bytes(size))
        with windows(tmp_path / "image") as parts, pytest.raises(DiskReadFailed):
            read(parts[0])
